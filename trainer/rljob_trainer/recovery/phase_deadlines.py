"""Deadlines of phases: a phase that hangs ends, with the stacks of all role processes, and is then recovered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rljob_api.plan_change import Phase
from rljob_client.run_directory.records import StepRecord
from rljob_trainer.errors import PhaseDeadlineExceeded
from rljob_trainer.roles.time_limit import time_limit

_TIMES_USUAL = 10
"""A phase may take this many times its usual duration."""
_RECENT_STEPS = 20
_FIRST_TIMES_FLOOR = 6
"""A process compiles in the first run of a phase. The time of a checkpoint depends on the disk."""

_LOAD_TIMES_FLOOR = 12
_DUMP_BEGINS = "Timeout ("
"""First line of a dump by faulthandler."""

_LONGEST_DUMP_BYTES = 1 << 20


@dataclass(slots=True)
class PhaseDeadlines:
    """The time limits of the phases of one attempt."""

    floor_seconds: float
    """Minimum limit of a phase; 0: no limits."""

    steps: Sequence[StepRecord]
    """The committed steps, which grow."""

    overlapped: Phase | None = None
    """The phase whose work is done during another one: the rollout of the next step with `algorithm.maxStaleness: 1`,
    or a streamed update. The phase is then the wait for the rest, which a failure can extend to all."""

    _seen: set[Phase] = field(default_factory=set, init=False)

    def limited(
        self, phase: Phase | None, *, writing: bool = False, times: float = 1.0
    ) -> AbstractContextManager[None]:
        """Limit the calls of a phase within the block; None: of a start of roles.

        `writing`: a checkpoint is being written. If it is written without a copy, the phase waits until that is done.
        `times`: work of an evaluation, as a multiple of a step's.
        """
        seconds = self.limit_seconds(phase, writing=writing)
        return time_limit(None if seconds is None else seconds * times)

    def limit_seconds(self, phase: Phase | None, *, writing: bool = False) -> float | None:
        """Ten times the usual time of the phase, but at least the floor; more while a process compiles or writes."""
        if not self.floor_seconds:
            return None
        if phase is None:
            return self.floor_seconds * _LOAD_TIMES_FLOOR
        overlapped = phase == self.overlapped
        parts: tuple[Phase, ...] = ("rollout", "update") if overlapped else (phase,)
        recent = [sum(step.seconds.get(part, 0.0) for part in parts) for step in self.steps[-_RECENT_STEPS:]]
        first = phase not in self._seen or phase == "checkpoint" or writing or (overlapped and not recent)
        usual = (max(recent) if phase == "checkpoint" else median(recent)) if recent else 0.0
        return max(self.floor_seconds * (_FIRST_TIMES_FLOOR if first else 1), _TIMES_USUAL * usual)

    def done(self, phase: Phase) -> None:
        """The phase has succeeded in the present processes."""
        self._seen.add(phase)

    def forget(self) -> None:
        """New processes start: their first phases compile again."""
        self._seen.clear()


def with_stacks(
    failure: PhaseDeadlineExceeded, logs: Path, actors: Sequence[str], step: int, phase: Phase | None
) -> PhaseDeadlineExceeded:
    """`failure` with the innermost frame of its process. Writes the stacks of all `actors` to one file in `logs`.

    A role process has written its stacks at the end of its log.
    """
    dumps = {actor: dump for actor in actors if (dump := _last_dump(logs / f"{actor}.log"))}
    explained = PhaseDeadlineExceeded(f"{failure}{_place(dumps, failure.actor)}")
    if dumps:
        file = logs / f"stacks-step-{step}-{phase or 'start'}.txt"
        file.write_text("".join(f"=== {actor}\n{dump}\n" for actor, dump in dumps.items()), encoding="utf-8")
        explained = PhaseDeadlineExceeded(f"{explained}. Stacks of {', '.join(dumps)}: {file}")
    explained.actor = failure.actor
    return explained


def innermost_frame(dump: str) -> str | None:
    """`all_reduce (distributed_c10d.py:2501)`: the innermost frame of the role's own thread; None if there is none."""
    threads = dump.split("\n\n")
    own = next((thread for thread in threads if "roles/actor.py" in thread), threads[-1])
    for line in own.splitlines():
        if line.startswith("  File "):
            _, file, rest = line.split('"', 2)
            number, _, function = rest.removeprefix(", line ").partition(" in ")
            return f"{function} ({Path(file).name}:{number})"
    return None


def _place(dumps: dict[str, str], actor: str | None) -> str:
    frame = innermost_frame(dumps.get(actor or "", ""))
    return f"; it was in {frame}" if frame else "; it has written no stack"


def _last_dump(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LONGEST_DUMP_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    _, found, dump = text.rpartition(_DUMP_BEGINS)
    return found + dump if found else None
