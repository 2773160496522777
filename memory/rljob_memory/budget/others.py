"""Memory of programs whose setup is unknown: other trainers and engines, as logs and reports show them."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_memory.budget.gpu import CONTEXT_BYTES
from rljob_memory.budget.lines import UPDATE, Line
from rljob_memory.sizes import GIB, MIB

LEAST_FOREIGN_BYTES, LEAST_FOREIGN_SHARE = GIB, 0.05
"""Memory of a GPU below the larger of these that is neither free nor of a process is the driver's: 0.3–0.6 GiB on cards
of 24–180 GiB."""

OUTSIDE_TORCH_BYTES = CONTEXT_BYTES
"""Context, NCCL and libraries of a process, where only its torch is known."""

SLEEPING_ENGINE_BYTES, SLEEPING_ENGINE_SHARE = 8 * GIB, 0.15
"""The smaller of the two is what an engine may keep while it sleeps, on large cards and on small ones: 1–7 GiB of
context, NCCL and CUDA graphs have been seen."""

SMALLEST_CONTEXT_BYTES, LARGEST_CONTEXT_BYTES = 200 * MIB, 1280 * MIB
"""A context with torch's kernels takes 250–900 MiB (pytorch issues 20532 and 49481; 719 MiB after a first product on an
H200), 1.2 GiB with a communicator of NCCL (returnn issue 1469). Most of them are on GPU 0, the default device."""

ADAPTED_KV_CACHE_BYTES = 16 * GIB
"""KV cache with which the plan's is compared if an adapter runs the engine: its usual part of a GPU of 80 GiB."""
KV_CACHE_BYTES, BUCKET_BYTES = GIB, GIB
"""Size in another trainer's first plan: a base for changes."""
SMALLEST_BUCKET_BYTES = BUCKET_BYTES // 8
"""Share of verl's default that its adapter sets at least."""

_DEFAULT_BYTES = 2
"""bfloat16, which nearly all trainers load models in."""
_ADAM_BYTES = 8
"""Two moments in float32 for each trained parameter."""


def copy_lines(parameters: int, trained: int, parameter_bytes: int | None, reason: str) -> Iterator[Line]:
    """One unsharded copy of a model in training, as programs without float32 masters have it."""
    each = parameter_bytes or _DEFAULT_BYTES
    sizes = {"weights": parameters * each, "gradients": trained * each, "Adam's state": trained * _ADAM_BYTES}
    for use, size in sizes.items():
        yield Line("policy", use, "gpu", size, UPDATE, reason)
