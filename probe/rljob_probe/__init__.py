"""Says why a training process ran out of memory. Runs inside other people's programs: it may cost nothing, print
nothing, raise nothing, and change nothing that they can see.

`site/sitecustomize.py` is what Python finds on its path; `start.py` is where to read on.
"""
