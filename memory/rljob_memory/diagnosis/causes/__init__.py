"""The causes of out-of-memory failures, by the memory that they explain."""
