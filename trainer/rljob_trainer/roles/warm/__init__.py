"""Start role processes as forks of a process that has imported their libraries.

Most of the start of a role's process is the import of torch and vLLM. For each role, one process imports them once,
as early as possible, and forks the role's processes on request, also those that replace a lost one. vLLM changes torch
for the whole process, so that the roles cannot share it.

    raylet ──starts──▶ setup_worker.py ──connects──▶ server.py ──forks──▶ Ray's worker

Nothing depends on it: without a server, or with one that has died, `setup_worker.py` runs Ray's worker itself.
"""
