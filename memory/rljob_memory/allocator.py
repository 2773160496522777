"""Environment variables of torch's CUDA allocator for each role. torch reads them once, when a process starts."""

from __future__ import annotations

import re

from rljob_api.api_model import Toggle
from rljob_api.status import Role

ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The one name that every torch reads for CUDA: 2.9 ignores `PYTORCH_ALLOC_CONF`, later ones read it only if this
one is absent, and vLLM before 0.31 looks at this one alone."""

IGNORED_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
"""The newer name, which no torch reads if `ALLOCATOR_VARIABLE` is set."""

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""Hides every GPU, from CUDA and from NVIDIA's container runtime, which shows all GPUs to a container that requests
none."""

_OLDEST_TORCH = (2, 6)


def allocator_environment(role: Role, torch_version: str) -> dict[str, str]:
    """Environment variables of a process of `role` of RLJob's own trainer, to be set before it starts.

    - controller: no GPU is visible, so no stray call can put a CUDA context on a GPU that the controller does not use.
    - rollout: expandable segments are off. vLLM's custom all-reduce with CUDA graphs crashes with them, and the sleep
      mode's memory pool gains nothing from them.
    - policy: expandable segments are off at the start too, even if the plan enables them. The policy switches them on
      once the model is built: the weights are then in classic memory, which CUDA IPC can export without the
      privileges (pidfd_getfd) that expandable segments need.

    Raises ValueError if `torch_version` is older than 2.6: its allocator cannot be switched as the plan needs.
    """
    if torch_release(torch_version) < _OLDEST_TORCH:
        raise ValueError(f"expected torch 2.6 or newer, found {torch_version}; install a newer torch")
    if role == "controller":
        return dict(NO_GPU)
    return {ALLOCATOR_VARIABLE: "expandable_segments:False"}


def other_trainer_environment(expandable_segments: Toggle) -> dict[str, str]:
    """Environment variables of a process of another trainer, in options that every torch since 2.6 knows.

    Auto sets nothing: expandable segments may break a trainer that runs vLLM in the same process.
    """
    if expandable_segments == "Auto":
        return {}
    return {ALLOCATOR_VARIABLE: f"expandable_segments:{expandable_segments == 'Enabled'}"}


def torch_release(version: str) -> tuple[int, int]:
    """(2, 13) for 2.13.0+cpu. Raises ValueError if it is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"expected a torch version such as 2.13.0, found {version!r}")
    return int(found[1]), int(found[2])
