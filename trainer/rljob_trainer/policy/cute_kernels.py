"""vLLM's copy of FlashAttention 4, imported with this module.

Raises `ImportError` without vLLM for CUDA and its CUTLASS DSL. The packages around it are not run: that of vLLM changes
settings of torch's compiler.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def _import() -> Any:
    found = PathFinder.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ImportError("expected the package vllm, found none")
    directory, stand_ins = Path(found.submodule_search_locations[0]), []
    for name, path in (("vllm", directory), ("vllm.vllm_flash_attn", directory / "vllm_flash_attn")):
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(path)]
            sys.modules[name] = module
            stand_ins.append(name)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # compiling takes as long as a layer of torch
    try:
        return importlib.import_module("vllm.vllm_flash_attn.cute.interface")
    finally:
        for name in stand_ins:
            del sys.modules[name]


interface = _import()
