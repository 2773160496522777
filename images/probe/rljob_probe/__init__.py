"""Reports why a training process ran out of memory.

The probe runs inside other people's programs. It must not cost time, print, raise, or change their behavior. Python
loads `site/sitecustomize.py`, which calls `start.py`.
"""
