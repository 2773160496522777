"""Diagnosis of labelled pods that no RLJob owns: their out-of-memory failures become Events and a metric."""
