"""The API can be used without torch, as in the operator's image."""

from __future__ import annotations

import subprocess
import sys

_HEAVY = ("torch", "vllm", "ray", "transformers", "numpy", "kubernetes", "kopf")


def test_the_api_and_the_memory_part_import_nothing_heavy() -> None:
    program = f"""
import importlib, pkgutil, sys
import rljob_api, rljob_memory
for package in (rljob_api, rljob_memory):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(sorted(set(sys.modules) & set({_HEAVY!r})))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
