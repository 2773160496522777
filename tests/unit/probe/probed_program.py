"""Runs a Python program with the probe on its path, as in a container, and reads the files it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import rljob_probe
from rljob_api.step_report import Evidence
from rljob_api.termination_message import TerminationMessage, read_termination_message
from rljob_testing.patience import PATIENCE_SECONDS

SITE = Path(rljob_probe.__file__).parent / "site"


@dataclass(frozen=True)
class EndedProgram:
    exit_code: int
    output: str
    errors: str


@dataclass
class ProbedProgram:
    """Programs that share a container: its termination log, and the directory of notes."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    python: str | Path = sys.executable

    @property
    def log(self) -> Path:
        return self.directory / "termination-log"

    @property
    def notes(self) -> Path:
        return self.directory / "notes"

    @property
    def message(self) -> TerminationMessage | None:
        """The termination message as the operator reads it. Fails if something else was written."""
        if not self.log.exists() or not self.log.read_text():
            return None
        message = read_termination_message(self.log.read_text())
        assert message is not None, self.log.read_text()
        return message

    @property
    def evidence(self) -> Evidence:
        """Evidence of the termination message. Fails if there is none."""
        assert self.message is not None
        assert self.message.evidence is not None
        return self.message.evidence

    def run(
        self,
        code: str,
        *flags: str,
        probed: bool = True,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> EndedProgram:
        script = self.directory / "program.py"
        script.write_text(code)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RLJOB_", "PYTHON"))}
        own = {
            "RLJOB_TERMINATION_LOG": str(self.log),
            "RLJOB_PROBE_NOTES": str(self.notes),
            "PYTHONPATH": str(SITE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [self.python, *flags, str(script)],
            env=inherited | (own if probed else {}) | self.environment | dict(environment or {}),
            cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        return EndedProgram(done.returncode, done.stdout, done.stderr)


FAKE_TORCH = {
    "__init__.py": """
class OutOfMemoryError(RuntimeError):
    pass


class _C:
    @staticmethod
    def _cuda_attach_out_of_memory_observer(observer):
        assert cuda.used, "attaching begins to use CUDA"
        cuda.observers.append(observer)


from torch import cuda, optim
""",
    "cuda.py": """
import torch

used = False
allocated = 3 << 30
waiting = []
observers = []


def _lazy_call(function):
    function() if used else waiting.append(function)


def memory_stats(device=0):
    return {
        "allocated_bytes.all.current": allocated, "allocated_bytes.all.peak": 5 << 30,
        "reserved_bytes.all.current": allocated + (1 << 30), "reserved_bytes.all.peak": 6 << 30,
    }


def use():
    global used
    used = True
    for function in waiting:
        function()


def run_out_of_memory():
    for observer in observers:
        observer(0, 2 << 30, 8 << 30, 1 << 30)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
""",
    "optim/optimizer.py": """
hooks = {"before": [], "after": []}


def register_optimizer_step_pre_hook(hook):
    hooks["before"].append(hook)


def register_optimizer_step_post_hook(hook):
    hooks["after"].append(hook)
""",
    "optim/__init__.py": """
from torch.optim import lr_scheduler, optimizer


class Optimizer:
    def __init__(self):
        self.state = {}

    def step(self):
        for hook in optimizer.hooks["before"]:
            assert hook(self, (), {}) is None
        self._step()
        for hook in optimizer.hooks["after"]:
            hook(self, (), {})

    def _step(self):
        self.state.setdefault("weight", {"step": 0})["step"] += 1
""",
    "optim/lr_scheduler.py": """
class LRScheduler:
    last_epoch = 0
""",
}
"""A torch with a GPU in it that runs out of memory on request."""


def write_fake_torch(directory: Path, part: str = "", instead: str = "") -> None:
    """Writes a fake torch next to the program, with `part` of it replaced."""
    for name, text in FAKE_TORCH.items():
        path = directory / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(part, instead) if part else text)
