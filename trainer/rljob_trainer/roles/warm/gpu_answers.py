"""Answers to what modules ask about GPUs while a server imports them.

CUDA and NVML would leave a context or a thread in the server, which could then not be forked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_HANDLE = 0
"""Stands for NVML's handle of a GPU."""


@contextmanager
def gpus_answered(capability: Sequence[int] | None) -> Iterator[None]:
    """Within the block, answer that there are GPUs of this CUDA compute capability; None: that there is none.

    torch._inductor asks torch for GPUs (torch 2.11), and the library of FlashAttention 4 for their capability. vLLM
    asks NVML for their number, to choose its platform, and for their capability, to choose kernels (vLLM 0.26).
    """
    with ExitStack() as stack:
        if (torch := sys.modules.get("torch")) is not None:
            _replace(stack, torch.cuda, is_available=lambda: capability is not None)
        if capability is not None:
            if torch is not None:
                _replace(stack, torch.cuda, get_device_capability=lambda _device=None: tuple(capability))
            finder = _BeforePlatforms(stack, capability)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield


class _BeforePlatforms(MetaPathFinder):
    """Replaces functions of vLLM's copy of pynvml before `vllm.platforms` is imported, whose functions call them."""

    def __init__(self, stack: ExitStack, capability: Sequence[int]) -> None:
        self._stack = stack
        self._capability = capability

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """Find nothing: the other finders do."""
        if name == "vllm.platforms":
            _replace(
                self._stack,
                importlib.import_module("vllm.third_party.pynvml"),
                nvmlInit=lambda: None,
                nvmlShutdown=lambda: None,
                nvmlDeviceGetCount=lambda: 1,  # of several, vLLM compares the names
                nvmlDeviceGetHandleByIndex=lambda _index: _HANDLE,
                nvmlDeviceGetHandleByUUID=lambda _uuid: _HANDLE,
                nvmlDeviceGetIndex=lambda _handle: 0,
                nvmlDeviceGetCudaComputeCapability=lambda _handle: tuple(self._capability),
            )


def _replace(stack: ExitStack, module: ModuleType, **functions: Any) -> None:
    """Replace functions of `module` until `stack` is closed."""
    for name, function in functions.items():
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)
