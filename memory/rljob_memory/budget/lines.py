"""A memory budget: its lines, and the questions that can be asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Owner = Literal["policy", "engine", "controller"]
Place = Literal["gpu", "host", "shm", "disk"]
Pod = Literal["policy", "rollout"]
"""Pods, and their GPUs: those of the policy, which hold the engines too with topology Colocated, or those of engines
alone."""
Phase = Literal["start", "rollout", "update", "optimizer", "sync", "checkpoint", "export"]
"""`optimizer`: the end of an update, when activations are gone."""

PHASES: tuple[Phase, ...] = get_args(Phase)
UPDATE: frozenset[Phase] = frozenset({"update", "optimizer"})
ALWAYS: frozenset[Phase] = frozenset(PHASES)


@dataclass(frozen=True, slots=True)
class Line:
    """One use of one kind of memory."""

    owner: Owner
    use: str
    """Name of the use, such as `weights`."""
    place: Place
    bytes: int
    """Bytes on one GPU; in the host memory or /dev/shm of one pod; on the disk of the job."""
    phases: frozenset[Phase]
    """Phases in which it is in use."""
    reason: str
    """The formula or the setting that the size follows from."""
    pod: Pod = "policy"
    is_in_torch: bool = True
    """True if the allocator of its owner's torch counts it, unlike CUDA contexts and NCCL's buffers."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory and time that a job is predicted to need under a memory plan."""

    lines: tuple[Line, ...]
    seconds_by_phase: Mapping[Phase, float]
    """Longest time of a phase of one step."""
    overlaps: bool = False
    """The engines generate the next step during an update."""

    def of(self, place: Place, *, pod: Pod = "policy", owner: Owner | None = None) -> Budget:
        """The part of one place and pod, and of one owner if it is given."""
        return Budget(
            tuple(
                line for line in self.lines if line.place == place and line.pod == pod and owner in (None, line.owner)
            ),
            self.seconds_by_phase,
            self.overlaps,
        )

    def total(self, place: Place, phase: Phase, *, pod: Pod = "policy") -> int:
        """Bytes in a phase."""
        return sum(
            line.bytes for line in self.lines if line.place == place and line.pod == pod and phase in line.phases
        )

    def in_torch(self, owner: Owner, phase: Phase) -> int:
        """Bytes of one GPU that the torch of a rank, or of an engine, holds in a phase."""
        return sum(
            line.bytes
            for line in self.lines
            if line.place == "gpu" and line.owner == owner and phase in line.phases and line.is_in_torch
        )

    def peak(self, place: Place, phase: Phase | None = None, *, pod: Pod = "policy") -> int:
        """Most bytes in any phase. `phase`: in this one; an update ends with its optimizer step."""
        phases = PHASES if phase is None else tuple(UPDATE) if phase == "update" else (phase,)
        return max(self.total(place, each, pod=pod) for each in phases)

    def peak_phase(self, place: Place) -> Phase:
        """The first phase with most bytes, in a pod of the policy."""
        return max(PHASES, key=lambda phase: self.total(place, phase))

    def uses(self, place: Place, phase: Phase, *, pod: Pod = "policy") -> list[Line]:
        """The lines in use in a phase, the largest first."""
        found = (line for line in self.lines if line.place == place and line.pod == pod and phase in line.phases)
        return sorted(found, key=lambda line: -line.bytes)

    def bytes_of(self, use: str, place: Place) -> int:
        """Bytes of one use in a pod of the policy, over all owners; 0 if there is none."""
        return sum(line.bytes for line in self.lines if (line.use, line.place, line.pod) == (use, place, "policy"))

    def pods(self) -> Iterator[Pod]:
        """The kinds of pods that the job has."""
        for pod in get_args(Pod):
            if any(line.pod == pod for line in self.lines):
                yield pod

    def seconds(self, phase: Phase | None = None) -> float:
        """Seconds of a phase; of a whole step without one."""
        if phase is not None:
            return self.seconds_by_phase.get(phase, 0.0)
        hidden = min(self.seconds("rollout"), self.seconds("update")) if self.overlaps else 0.0
        return sum(self.seconds_by_phase.values()) - hidden
