"""Other trainers and engines, from `programs.toml`: the lines that identify them, and their memory options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib.resources import files

from pydantic import TypeAdapter


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
    CACHE = "cache"
    """torch's cache: emptied more often."""
    SEGMENTS = "segments"
    """torch's segments: expandable ones leave no pieces."""
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
    since: str | None = None
    """The first version of the program that has it under this name; None for all earlier ones too."""
    before: str | None = None
    """The first version that no longer has it under this name; None if the newest one has it."""
    when: str | None = None
    """A setting with which it counts, `NAME=VALUE`; or `NAME`, if the log has a number above 0 for it."""
    backend: str | None = None
    """The backend of the trainer with which it counts: `fsdp` or `megatron`. None: it counts with all."""

    @property
    def leaf(self) -> str:
        """The last part of a dotted name, without dashes at the start: the key in a printed configuration."""
        return _leaf(self.name)

    @property
    def full_name(self) -> str:
        """The whole name without dashes at the start."""
        return self.name.lstrip("-")

    def value(self, values: Mapping[str, str]) -> str | None:
        """Its value among the settings in a log, by its whole name, else by the last part; None if they lack it."""
        return values.get(self.full_name, values.get(self.leaf))

    def is_of(self, version: str | None) -> bool:
        """True if that version has it under this name; also if the version is unknown."""
        if version is None:
            return True
        is_new_enough = self.since is None or _parts(version) >= _parts(self.since)
        return is_new_enough and (self.before is None or _parts(version) < _parts(self.before))

    def counts_with(self, values: Mapping[str, str]) -> bool:
        """True if the settings in the log, by the last part of their names, are those with which it counts."""
        if self.when is None:
            return True
        name, _, wanted = self.when.partition("=")
        value = values.get(_leaf(name), "")
        return value.lower() == wanted.lower() if wanted else value.isdigit() and int(value) > 0


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

    def option(
        self,
        effect: Effect,
        version: str | None = None,
        values: Mapping[str, str] | None = None,
        names: Collection[str] = (),
        backend: str = "fsdp",
    ) -> Option | None:
        """The option of that version; of an unknown one, the option whose name the log has, else that of the newest.

        `values`: the settings in the log, by the last part of their names. `names`: all such parts in it. `backend`:
        that of the trainer. An option that the newest version lacks is the last choice.
        """
        fitting = [
            option
            for option in self.options
            if option.effect is effect
            and option.is_of(version)
            and option.counts_with(values or {})
            and option.backend in (None, backend)
        ]
        if version is None:
            newest = [option for option in fitting if option.before is None]
            shown = [option for option in fitting if option.leaf in names]
            if not any(option in shown for option in newest):
                fitting = shown or newest or fitting
        return fitting[0] if fitting else None

    def older(self, option: Option) -> Option | None:
        """The option that versions before that of `option` have in its place; None if it is the same."""
        if option.since is None:
            return None
        replaced = (other for other in self.options if other.effect is option.effect and other.before == option.since)
        return next((other for other in replaced if (other.when is None) == (option.when is None)), None)

    @cached_property
    def names_in_logs(self) -> frozenset[str]:
        """Last parts of all names whose values count, of every version."""
        conditions = (option.when.partition("=")[0] for option in self.options if option.when)
        return frozenset(option.leaf for option in self.options) | {_leaf(name) for name in conditions}


def _leaf(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]


def _parts(version: str) -> tuple[int, ...]:
    """Numbers of a version, comparable: `0.10.2` is above `0.9`."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


_TABLE = tomllib.loads(files(__package__).joinpath("programs.toml").read_text(encoding="utf-8"))
_ENTRY = TypeAdapter(Program)
PROGRAMS: Mapping[str, Program] = {key: _ENTRY.validate_python({"key": key, **entry}) for key, entry in _TABLE.items()}
"""Programs by key: trainers first, then engines."""
