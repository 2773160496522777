"""The algorithms as pure functions: an advantage over the rewards of a step, and a loss over response tokens.

A row of `rljob_api.algorithms` combines the two and has their settings; a manifest may name functions of its own.
"""
