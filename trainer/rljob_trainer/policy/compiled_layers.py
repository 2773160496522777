"""Compiles the decoder layers of the policy on GPUs, and counts how often that happens."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

VARIANTS = 64
"""Most variants of a layer. torch's default of 8 is reached by legal settings: one sequence or several, with gradient
or without, with activation checkpointing, and the same again for the reference model."""

_ASKS_FOR_LENGTHS = "triton.mix_order_reduction"  # torch 2.10 and newer


def compile_layers(layers: Iterable[nn.Module], **how: Any) -> None:
    """Compile the forward of each layer: norms, rotary embedding and activation are fused into few kernels.

    This halves the time of an update and saves a third of its memory. Lengths are symbolic, so that a new length needs
    no compilation. One fusion depends on the length and is disabled: it recompiles a layer on each side of its
    thresholds, which takes 8 s on an H200 when a failed update is retried with smaller micro-batches.

    A layer that cannot be compiled again raises an error: uncompiled, it would save 34 instead of 22 numbers for each
    hidden unit and run at half the speed.

    Each further compilation is logged with its reason. `how`: arguments of torch.compile instead of the options above.
    """
    import torch
    from torch._dynamo import config
    from torch._inductor import list_options
    from torch._logging._internal import set_logs

    layers = list(layers)
    config.recompile_limit = max(config.recompile_limit, VARIANTS)
    # Of all layers and of two models, the policy and its reference, which may share one code object.
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * VARIANTS * len(layers))
    config.fail_on_recompile_limit_hit = True
    set_logs(recompiles=True)
    options: dict[str, Any] = {_ASKS_FOR_LENGTHS: False} if _ASKS_FOR_LENGTHS in list_options() else {}
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, **(how or {"options": options}))


def compilations() -> int:
    """Number of graphs that this process has compiled so far. Does not import the compiler."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters["stats"]["unique_graphs"] if counters else 0
