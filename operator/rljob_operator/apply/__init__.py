"""Carries a decision out: every write of the operator is made here."""
