"""Imports of thousands of modules, as of torch and vLLM."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_imports() -> Iterator[None]:
    """Around imports that take seconds: what they make stays, and looking for garbage in it only takes time.

    The garbage collector is off in the block, and later passes over what is there at its end. Both together are a
    fifth of the start of an engine, which collects again and again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
