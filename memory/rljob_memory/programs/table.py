"""The table of programs, from `programs.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib.resources import files
from typing import Any


class Effect(StrEnum):
    """The use of memory that an option changes."""

    UPDATE = "update"
    """Activations of the update: the size of its micro-batches."""
    LOGPROBS = "logprobs"
    """The pass that computes log-probabilities: the size of its micro-batches."""
    LOGITS = "logits"
    """Logits and loss: chunks, fused kernels."""
    ACTIVATIONS = "activations"
    """Activations: checkpointing, offload."""
    OPTIMIZER = "optimizer"
    """The optimizer's state: offload, smaller types."""
    PARAMETERS = "parameters"
    """Weights of the policy: offload, more shards."""
    WEIGHTS = "weights"
    """Weights of the policy: a smaller type, quantization, adapters."""
    ENGINE_PARALLEL = "engine-parallel"
    """GPUs that share the weights of one engine."""
    REFERENCE = "reference"
    """The reference model."""
    SHARE = "share"
    """The engine's share of the GPU."""
    SLEEP = "sleep"
    """The engine frees its memory while the policy is updated."""
    LENGTH = "length"
    """The longest sequence of the engine."""
    SEQUENCES = "sequences"
    """Sequences that the engine generates at once."""
    SYNC = "sync"
    """Buffers of the weight sync."""
    ALLOCATOR = "allocator"
    """torch's cache and its segments."""
    LOADER = "loader"
    """Host memory of the data loader."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a program, as its user writes it."""

    name: str
    effect: Effect
    default: str | None = None
    """Value if the user sets none; None if it has none, or it depends on the version."""
    change: str | None = None
    """`halve`, `double`, `lower` (a share of the GPU), or the value to set. None: it depends on the job."""
    note: str = ""
    """Words that follow the option."""

    @property
    def leaf(self) -> str:
        """The last part of a dotted name, without dashes at the start: the key in a printed configuration."""
        return self.name.lstrip("-").rpartition(".")[2]


@dataclass(frozen=True)
class Program:
    """A trainer or an engine."""

    key: str
    title: str
    version: str
    """The version that the options were read from."""
    recognize: tuple[str, ...]
    """Parts of lines of a log that only this program prints."""
    options: tuple[Option, ...]
    engine: bool = False
    """It generates; a trainer's options come before those of its engine."""

    def option(self, effect: Effect) -> Option | None:
        return next((option for option in self.options if option.effect is effect), None)

    @cached_property
    def leaves(self) -> frozenset[str]:
        return frozenset(option.leaf for option in self.options)


def _program(key: str, entry: Mapping[str, Any]) -> Program:
    return Program(
        key=key,
        title=entry["title"],
        version=entry["version"],
        recognize=tuple(entry["recognize"]),
        options=tuple(Option(**{**option, "effect": Effect(option["effect"])}) for option in entry["options"]),
        engine=entry.get("engine", False),
    )


_TABLE = tomllib.loads(files(__package__).joinpath("programs.toml").read_text(encoding="utf-8"))
PROGRAMS: Mapping[str, Program] = {key: _program(key, entry) for key, entry in _TABLE.items()}
"""By key: trainers first, then engines."""
