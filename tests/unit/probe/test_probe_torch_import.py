"""The import hook of the probe affects no import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROBE = Path(__file__).parents[3] / "images" / "probe"

# Without site packages, the finder after the probe's is that of the builtin modules.
PROGRAM = """
import importlib.machinery, sys, types
from rljob_probe.torch_import import when_torch_is_imported

called = []
for name in ("torch", "torch.cuda"):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
when_torch_is_imported(called.append)
builtin = next(name for name in sys.builtin_module_names if name not in sys.modules)
__import__(builtin)
import graphlib
assert called == [sys.modules["torch"]], called
"""


def test_the_import_that_finds_torch_loaded_finds_its_module() -> None:
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, env={"PYTHONPATH": str(PROBE)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
