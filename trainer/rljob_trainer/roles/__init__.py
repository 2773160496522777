"""The roles of a job as Ray actors: one policy process and one rollout process per GPU."""
