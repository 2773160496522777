"""Reading of manifests: documents with line numbers, all their problems, and what to write instead."""
