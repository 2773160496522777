"""Generation on several engines, of which some may be lost meanwhile: the others take over their part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

from rljob_memory.sample import MemorySample
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.role_processes import RoleProcesses
from rljob_trainer.roles.time_limit import time_limit
from rljob_trainer.rollout.work import EngineWork

Result = TypeVar("Result")

_START_SECONDS = 1800.0


@dataclass(slots=True)
class Generation(Generic[Result]):
    """Items of one step, such as groups of completions, that the engines generate meanwhile."""

    engines: RoleProcesses
    step: int
    items: int
    """Number of items. Each engine gets successive ones."""
    work: Callable[[range], EngineWork]
    """The work that generates the given items."""
    on_results: Callable[[int, Sequence[Result]], None]
    """Called with the results of a share when they arrive, and with the index of its first item."""
    replacement: Callable[[WorkerLost], Calls | None]
    """Called when an engine was lost while others remain: begins to start another in its place. None: the step has
    failed."""
    _rounds: list[_Round] = field(init=False)
    _starting: Calls = field(default_factory=dict, init=False)
    _memory: dict[str, MemorySample] = field(default_factory=dict, init=False)
    _found: dict[int, list[Result]] = field(default_factory=dict, init=False)
    """The results of each share, by its first item."""
    _lost: set[str] = field(default_factory=set, init=False)
    """First processes of lost engines."""

    def __post_init__(self) -> None:
        self._rounds = [self._begin(range(self.items))]

    def finish(self) -> tuple[list[Result], dict[str, MemorySample]]:
        """The results in the order of the items, and the memory of the engines' processes by name. Engines that were
        replaced are up."""
        while self._rounds:
            current = self._rounds.pop(0)
            try:
                wait_for(dict(current.calls), "generating", partial(self._take, current))
            except WorkerLost as failure:
                engine = self._engine_of(failure.actor)
                if not (current.calls.keys() & set(engine) and self._continue_without(engine, failure)):
                    raise
                share = current.shares[engine[0]]
                current.drop(engine)
                again = [] if share.start in self._found else [self._begin(share)]
                self._rounds = [*([current] if current.calls else []), *self._rounds, *again]
        if self._starting:
            with time_limit(_START_SECONDS):
                wait_for(self._starting, "starting in place of a lost engine")
        return [result for first in sorted(self._found) for result in self._found[first]], self._memory

    def _begin(self, items: range) -> _Round:
        """Calls for `items` to all engines that were not lost. An engine serves its calls in order."""
        working = [engine for engine in self.engines.units if engine[0] not in self._lost]
        begun = _Round()
        for engine, share in zip(working, _shares(items, len(working)), strict=True):
            if share:
                begun.shares[engine[0]] = share
                begun.calls.update({name: self._call(name, share) for name in engine})
        return begun

    def _call(self, name: str, share: range) -> Any:
        return self.engines.handles[name].generate_for_step.remote(self.step, self.work(share))

    def _engine_of(self, name: str | None) -> tuple[str, ...]:
        """The processes of the engine of which `name` is one; empty if it is of none."""
        return next((engine for engine in self.engines.units if name in engine), ())

    def _continue_without(self, engine: tuple[str, ...], failure: WorkerLost) -> bool:
        """True if the other engines can take over. The replacement of a lost engine has no weights for this step."""
        if engine[0] in self._lost:
            return True
        if isinstance(failure, PhaseDeadlineExceeded):
            return False  # it hangs, and may still answer
        self._lost.add(engine[0])
        started = self.replacement(failure) if len(self._lost) < len(self.engines.units) else None
        self._starting |= started or {}
        return started is not None

    def _take(self, current: _Round, name: str, result: Any) -> None:
        results, self._memory[name] = result
        del current.calls[name]
        if share := current.shares.get(name):
            self._found[share.start] = results
            self.on_results(share.start, results)


@dataclass(frozen=True, slots=True)
class _Round:
    """Calls for a part of the items."""

    shares: dict[str, range] = field(default_factory=dict)
    """The part of each engine by the name of its first process, which alone returns the results."""

    calls: Calls = field(default_factory=dict)
    """Calls without a result yet, to all processes of the engines."""

    def drop(self, engine: tuple[str, ...]) -> None:
        for name in engine:
            self.calls.pop(name, None)


def _shares(items: range, engines: int) -> list[range]:
    """Contiguous parts of `items`, of sizes that differ by one at most."""
    bounds = [len(items) * engine // engines for engine in range(engines + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]
