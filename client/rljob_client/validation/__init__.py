"""`rljob validate`: everything about a manifest that can be known before a job starts."""
