"""Role, rank, step and phase of a process, as far as it can find them out by itself."""

from __future__ import annotations

import gc
import os
import sys
import time
from types import FrameType
from typing import Any, Iterable, Iterator

_ROLES = ("controller", "policy", "rollout")
_PHASE_OF_SOURCE = (
    ("update", ("/torch/autograd/", "/torch/optim/")),
    ("rollout", ("/transformers/generation/", "/vllm/")),
)


def place() -> dict[str, Any]:
    """Attempt, role and rank, from environment variables of the operator and of torchrun."""
    role = os.environ.get("RLJOB_ROLE", "")
    return {
        "attempt": max(_number("RLJOB_ATTEMPT"), 1),
        "role": role if role in _ROLES else "policy",
        "rank": _number("RANK") if "RANK" in os.environ else _first_rank_of_the_pod(),
    }


def timestamp() -> str:
    """RFC 3339, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def current_step() -> int:
    """Current optimizer step, from 1: one more than the completed steps of the optimizers, or else of the schedulers.

    Both counts continue from a checkpoint. Scans all objects of the process, so call it only after memory ran out.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return 1
    try:
        return 1 + _steps_done(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    except Exception:
        return 1


def all_objects() -> list[Any]:
    """All objects that the garbage collector tracks or has frozen, as vLLM has it freeze an engine. Call it only after
    memory ran out: the collector then tracks the frozen ones again, which slows it down."""
    gc.unfreeze()
    return gc.get_objects()


def _steps_done(optimizer_class: type, scheduler_class: type) -> int:
    optimizer_steps, scheduler_steps = 0, 0
    for thing in all_objects():
        ancestors = type(thing).__mro__  # not isinstance(): a proxy would pretend to be its target
        if optimizer_class in ancestors:
            optimizer_steps = max(optimizer_steps, _steps_of(thing))
        elif scheduler_class in ancestors:
            scheduler_steps = max(scheduler_steps, _whole(getattr(thing, "last_epoch", 0)))
    return optimizer_steps or scheduler_steps


def _steps_of(optimizer: Any) -> int:
    """Completed steps, as Adam-like optimizers count them. 0 if the count is on a GPU, where reading it would block."""
    for state in optimizer.state.values():
        step = state.get("step")
        on_gpu = getattr(getattr(step, "device", None), "type", "cpu") != "cpu"
        return 0 if step is None or on_gpu else _whole(step)
    return 0


def phase_of(sources: Iterable[str]) -> str | None:
    """Phase of the innermost of these source files that belongs to one.

    Without any file it is the update: torch's thread for the backward pass has no Python frames on its stack.
    """
    innermost_first = list(sources)
    if not innermost_first:
        return "update"
    phases = (_phase_of_source(source) for source in innermost_first)
    return next((phase for phase in phases if phase is not None), None)


def _phase_of_source(source: str) -> str | None:
    return next((phase for phase, parts in _PHASE_OF_SOURCE if any(part in source for part in parts)), None)


def sources_of_frames(frame: FrameType | None) -> Iterator[str]:
    """Source files of a stack, innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def peak_rss_bytes() -> int:
    """Peak resident memory of the process. 0 without /proc."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _first_rank_of_the_pod() -> int:
    return _number("RLJOB_INDEX") * max(_number("PET_NPROC_PER_NODE"), 1)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _whole(number: Any) -> int:
    try:
        return max(int(number), 0)
    except Exception:
        return 0
