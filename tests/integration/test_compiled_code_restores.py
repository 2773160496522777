"""Code that torch has compiled in one pod is used by the next one, and nothing is compiled again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljob_trainer.pods.compile_cache import CompileCache

PROGRAM = """
import json
import torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
layer = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
compiled = torch.compile(layer.forward, dynamic=True)
compiled(torch.randn(3, 8)).square().sum().backward()
counts = {**counters["aot_autograd"], **counters["inductor"]}
print(json.dumps({"hits": counts.get("autograd_cache_hit", 0), "misses": counts.get("autograd_cache_miss", 0)}))
"""


def compile_with(cache: CompileCache) -> dict[str, int]:
    """Cache hits and misses of a process that compiles a layer, forward and backward."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | cache.variables(), capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, int] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs a C++ compiler on a CPU")
def test_the_next_pod_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_pod() -> CompileCache:
        """The local directory has the same path in every pod, and is empty in a new one."""
        shutil.rmtree(tmp_path / "pod", ignore_errors=True)
        return CompileCache(tmp_path / "pod", tmp_path / "volume", "key-policy")

    first = new_pod()
    first.restore()
    assert compile_with(first) == {"hits": 0, "misses": 1}
    two_minutes_later = time.time() + 120
    monkeypatch.setattr(time, "time", lambda: two_minutes_later)
    assert "kept in" in (first.save_if_settled() or "")
    monkeypatch.undo()

    second = new_pod()
    assert "restored from" in second.restore()
    assert compile_with(second) == {"hits": 1, "misses": 0}
