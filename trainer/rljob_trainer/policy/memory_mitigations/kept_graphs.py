"""`detach_metrics` switched off, to measure what it is worth: what compiled layers need for their graphs to be kept."""

from __future__ import annotations

import torch


def allow_kept_graphs() -> None:
    """Compile the layers such that their graphs can outlive a backward pass; costs a new compilation.

    Otherwise backward reuses the memory of what forward has saved, and torch refuses to keep such a graph.
    """
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()
