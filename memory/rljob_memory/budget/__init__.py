"""The memory budget of a job: the only place that knows bytes and seconds.

Every constant and formula stands here once, with its source. The first plan, pod requests, the effect of a remedy and
`rljob plan` are questions about a `Budget`; the effect of a change is the difference of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rljob_api.job import RLJobSpec
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget.gpu import compilation_bytes, gpu_lines
from rljob_memory.budget.host import Copies, copies_with_room, host_lines
from rljob_memory.budget.lines import PHASES, Budget, Line, Owner, Phase, Place, Pod
from rljob_memory.budget.seconds import seconds_by_phase
from rljob_memory.budget.setup import USABLE_SHARE, Setup
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.workload import Workload, workload_of

__all__ = [
    "PHASES",
    "USABLE_SHARE",
    "Budget",
    "Copies",
    "Line",
    "Owner",
    "Phase",
    "Place",
    "Pod",
    "Setup",
    "budget",
    "compiles_ahead",
    "copies_with_room",
    "facts_of",
    "gpu_budget",
    "setup_of",
    "setup_of_facts",
]


def budget(setup: Setup, plan: MemoryPlan, copies: Copies | None = None) -> Budget:
    """The budget of a job under a memory plan. Pure.

    `copies`: that the policy keeps in host memory; by default those for which the host has room.
    """
    setup = setup.under(plan)
    copies = copies_with_room(setup, plan) if copies is None else copies
    lines = [*gpu_lines(setup, plan), *host_lines(setup, plan, copies)]
    seconds = seconds_by_phase(setup, plan, copies)
    return Budget(tuple(line for line in lines if line.bytes), seconds, setup.work.overlaps)


def gpu_budget(setup: Setup, plan: MemoryPlan) -> Budget:
    """The part of the GPUs, without seconds, for a search that asks many times."""
    return Budget(tuple(gpu_lines(setup.under(plan), plan)), {})


def compiles_ahead(setup: Setup, plan: MemoryPlan) -> bool:
    """True if the policy may compile its layers while the engine starts, since both have room.

    A policy that makes room for the engine before it starts compiles in its first update.
    """
    work, hardware = setup.work, setup.hardware
    if hardware.device == "cpu" or (plan.policy_offload and work.is_colocated):
        return False
    needed = gpu_budget(setup, plan).total("gpu", "start") + compilation_bytes(work, setup.model, plan)
    # FSDP2 allocates on several streams, which cannot reuse each other's free memory.
    room = hardware.device_memory_bytes * (USABLE_SHARE if work.policy_ranks > 1 else 1.0)
    return needed <= room


def setup_of(spec: RLJobSpec, facts: MemoryFacts | None) -> Setup | None:
    """The setup of a job whose trainer has reported `facts`; None before that."""
    if facts is None:
        return None
    values = facts.model_dump()
    model = ModelShape(**{name: values[name] for name in ModelShape.__dataclass_fields__})
    sizes = {name: values[name] for name in Hardware.__dataclass_fields__ if name != "device"}
    return Setup(workload_of(spec), model, Hardware("cuda" if facts.device_memory_bytes else "cpu", **sizes))


def setup_of_facts(facts: Mapping[str, Any]) -> Setup | None:
    """The setup of an attempt whose ledger has these facts; None if they are damaged, or of another version."""
    try:
        setup = Setup(*(part.validate_python(dict(facts)) for part in _PARTS))
    except ValidationError:
        return None
    parts = (setup.work, setup.model, setup.hardware)
    return setup if all(_is_possible(part) for part in parts) else None


_PARTS: tuple[TypeAdapter[Any], ...] = tuple(TypeAdapter(part) for part in (Workload, ModelShape, Hardware))


def _is_possible(part: Workload | ModelShape | Hardware) -> bool:
    """False if a number has no meaning: a size is 0 only where that is its default, or without a GPU."""
    for each in fields(part):
        value = getattr(part, each.name)
        may_be_zero = each.default == 0 or each.name == "device_memory_bytes"
        if not isinstance(value, str | bool) and not (0 if may_be_zero else 1) <= value < math.inf:
            return False
    return True


def facts_of(setup: Setup) -> MemoryFacts:
    """The facts that a trainer reports about a setup."""
    known = asdict(setup.model) | asdict(setup.hardware)
    return MemoryFacts.model_validate({name: value for name, value in known.items() if name != "device"})
