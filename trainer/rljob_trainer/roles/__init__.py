"""The roles of a job as Ray actors: one process a role a GPU."""
