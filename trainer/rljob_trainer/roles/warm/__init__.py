"""Start role processes as forks of a process that has imported their libraries.

Most of the start of a role's process is the import of torch and vLLM. One process imports torch, as early as possible.
A fork of it becomes the server of the other role, since vLLM changes torch for its whole process. Each server imports
the rest for its role, and forks the role's processes on request, also those that replace a lost one.

    raylet ──starts──▶ setup_worker.py ──connects──▶ server.py ──forks──▶ Ray's worker

Nothing depends on it: without a server, or with one that has died, `setup_worker.py` runs Ray's worker itself.
"""
