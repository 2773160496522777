"""Prediction of memory before a job runs: host memory by role, /dev/shm and disk. GPU memory: `rljob_memory.plan`."""
