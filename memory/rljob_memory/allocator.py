"""The environment that decides how torch's CUDA allocator behaves, for each role. Read once, when a process starts."""

from __future__ import annotations

import re

from rljob_api.status import Role

_OLDEST_TORCH = (2, 6)


def allocator_environment(role: Role, torch_version: str) -> dict[str, str]:
    """Environment variables of a process of `role`, to be set before it starts.

    Only `PYTORCH_CUDA_ALLOC_CONF` is written: torch 2.9 ignores `PYTORCH_ALLOC_CONF` for CUDA, later ones read it only
    where the older name is absent, and vLLM before 0.31 looks at the older name alone.

    - controller: no GPU is visible, neither to CUDA nor to NVIDIA's container runtime, so no stray call can put a CUDA
      context on a GPU that the controller does not use.
    - rollout: expandable segments are off. vLLM's custom all-reduce with CUDA graphs crashes with them, and the sleep
      mode's memory pool gains nothing from them.
    - policy: expandable segments are off at the start too, even where the plan wants them. The policy switches them on
      once the model is built: the weights then lie in classic memory, which CUDA IPC can export without the
      privileges (pidfd_getfd) that expandable segments need.

    Raises ValueError where `torch_version` is older than 2.6: its allocator cannot be switched the way the plan needs.
    """
    if _release(torch_version) < _OLDEST_TORCH:
        raise ValueError(f"expected torch 2.6 or newer, found {torch_version}; install a newer torch")
    if role == "controller":
        return {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"expected a torch version such as 2.13.0, found {version!r}")
    return int(found[1]), int(found[2])
