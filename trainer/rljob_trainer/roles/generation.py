"""Generation on several engines, which take groups from a queue. The others take over the groups of a lost one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from rljob_client.errors import RunError
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.roles.actor import RoleHandle
from rljob_trainer.roles.calls import Calls, next_result, result_of, wait_for
from rljob_trainer.roles.engine_processes import EngineProcesses
from rljob_trainer.roles.time_limit import TimeLimit, current_limit, time_limit
from rljob_trainer.rollout.lots import EngineWork, Generated

Result = TypeVar("Result")

_START_SECONDS = 1800.0
_DOING = "generating"

_numbers = count(1)


@dataclass(slots=True)
class Generation(Generic[Result]):
    """Generation of the items of one step, such as groups of completions, while the controller may do other work.

    Each engine has one call at a time, which returns when some of its items are complete, and begins more of them.
    """

    engines: EngineProcesses
    step: int
    queue: WorkQueue
    """Queue of all items."""
    work: Callable[[Sequence[int]], EngineWork]
    """The work that generates the given items."""
    on_result: Callable[[int, Result], None]
    """Called with an item and its result as soon as that arrives."""
    replacement: Callable[[WorkerLost], Calls | None]
    """Called when an engine was lost while others remain: begins to start another in its place, for which `finish`
    waits. Empty: it starts later, and is not waited for. None: the step has failed."""
    _units: list[tuple[str, ...]] = field(init=False)
    """Processes of each engine. These and their handles stay as they were when the generation began, since engines that
    are started later have no weights for it."""
    _handles: dict[str, RoleHandle] = field(init=False)
    _number: int = field(init=False)
    _limit: TimeLimit | None = field(init=False)
    _calls: Calls = field(default_factory=dict, init=False)
    """Calls without a result yet, to all processes of the engines."""
    _held: dict[str, list[int]] = field(default_factory=dict, init=False)
    """Items of each engine that are not complete, by the name of its first process, which alone returns results."""
    _unfinished: dict[str, int] = field(default_factory=dict, init=False)
    """Unfinished sequences of each engine."""
    _failed: set[str] = field(default_factory=set, init=False)
    """Processes whose call failed while the controller did something else."""
    _starting: Calls = field(default_factory=dict, init=False)
    _memory: dict[str, MemorySample] = field(default_factory=dict, init=False)
    _found: dict[int, Result] = field(default_factory=dict, init=False)
    _lost: set[str] = field(default_factory=set, init=False)
    """First processes of lost engines."""

    def __post_init__(self) -> None:
        self._units, self._handles = self.engines.working, dict(self.engines.handles)
        self._number, self._limit = next(_numbers), current_limit()
        working = self._working()
        for engine, items in zip(working, self.queue.first_portions(len(working)), strict=True):
            self._held[engine[0]], self._unfinished[engine[0]] = [], 0
            if items:
                self._call(engine, items)

    def finish(self) -> tuple[list[Result], dict[str, MemorySample]]:
        """The results in the order of the items, and the memory of the engines' processes by name. Engines that were
        replaced are up."""
        while self._calls:
            try:
                self._take(*next_result(self._calls, _DOING))
            except WorkerLost as failure:
                self._continue_without(self._engine_of(failure.actor), failure)
        if self._starting:
            with time_limit(_START_SECONDS):
                wait_for(self._starting, "starting in place of a lost engine")
        return [self._found[item] for item in sorted(self._found)], self._memory

    # --- while the controller waits for something else (`calls.serving`) ---

    def pending(self) -> Calls:
        """Calls whose results `serve` takes."""
        return {name: call for name, call in self._calls.items() if name not in self._failed}

    def serve(self, name: str) -> None:
        """Take a result that has arrived, and give the engine more. `finish` raises a failure."""
        try:
            result = result_of(self._calls[name], name, _DOING)
        except RunError:
            self._failed.add(name)
            return
        with time_limit(self._limit.seconds_left if self._limit else None):
            self._take(name, result)

    # --- internals ---

    def _take(self, name: str, generated: Generated) -> None:
        del self._calls[name]
        if generated.memory is not None:
            self._memory[name] = generated.memory
        engine = self._engine_of(name)
        if name == engine[0]:
            self._unfinished[name] = generated.unfinished_sequences
            for item, result in generated.results:
                self._held[name].remove(item)
                self._found[item] = result
                self.on_result(item, result)
        if not self._calls.keys() & set(engine):
            self._give(engine)

    def _give(self, engine: tuple[str, ...]) -> None:
        """Call an engine that has no call, unless there is nothing to do for it."""
        items = self.queue.portion(self._unfinished[engine[0]], len(self._working()))
        if items or self._held[engine[0]]:
            self._call(engine, items)

    def _call(self, engine: tuple[str, ...], items: Sequence[int]) -> None:
        self._held[engine[0]] += items
        work, left = self.work(items), self.queue.sequences_left
        for name in engine:
            self._calls[name] = self._handles[name].generate_for_step.remote(self.step, self._number, work, left)

    def _working(self) -> list[tuple[str, ...]]:
        """The processes of each engine that was not lost."""
        return [engine for engine in self._units if engine[0] not in self._lost]

    def _engine_of(self, name: str | None) -> tuple[str, ...]:
        """The processes of the engine that `name` belongs to; empty if there is none."""
        return next((engine for engine in self._units if name in engine), ())

    def _continue_without(self, engine: tuple[str, ...], failure: WorkerLost) -> None:
        """Let the other engines take over. Raises `failure` if they cannot."""
        if not self._calls.keys() & set(engine) or isinstance(failure, PhaseDeadlineExceeded):
            raise failure  # an engine that hangs may still answer
        self._lost.add(engine[0])
        started = self.replacement(failure) if self._working() else None
        if started is None:
            raise failure
        self._starting |= started
        for name in engine:
            self._calls.pop(name, None)
        self.queue.put_back(self._held.pop(engine[0]))
        for other in self._working():
            if not self._calls.keys() & set(other):
                self._give(other)


_SPARE = 8
"""Reserve of an engine, as a divisor of the sequences that it generates concurrently: it requests more before it idles,
but not after every completed response."""


@dataclass(slots=True)
class WorkQueue:
    """Items that no engine has yet, such as groups of completions. Pure: it depends on the calls alone."""

    expected: Sequence[float]
    """Expected time of each item, in any unit."""

    concurrent_sequences: int
    """Sequences that an engine generates concurrently."""

    sequences: int = 1
    """Sequences of each item."""

    _waiting: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = []
        self.put_back(range(len(self.expected)))

    def __len__(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    def put_back(self, items: Iterable[int]) -> None:
        """Add items, such as those of a lost engine: the longest first, and equally long ones in the order of the
        step."""
        self._waiting = sorted([*self._waiting, *items], key=lambda item: (-self.expected[item], item))

    def first_portions(self, engines: int) -> list[list[int]]:
        """The items with which each engine begins.

        The longest one is dealt first, each to the engine with the least work so far, up to the size of an engine. If
        the engines have room for all, all are dealt.
        """
        portions: list[list[int]] = [[] for _ in range(engines)]
        work = [0.0] * engines
        room = self._room(0)
        while self._waiting:
            open_engines = [engine for engine in range(engines) if len(portions[engine]) < room]
            if not open_engines:
                break
            engine = min(open_engines, key=lambda engine: (work[engine], len(portions[engine]), engine))
            item = self._waiting.pop(0)
            portions[engine].append(item)
            work[engine] += self.expected[item]
        return portions

    def portion(self, unfinished_sequences: int, engines: int) -> list[int]:
        """The next items of an engine with that many unfinished sequences: the longest, as many as it has room for. It
        gets at most its share of the waiting items among all `engines`, so that no engine has a reserve while another
        idles.
        """
        count = min(self._room(unfinished_sequences), -(-len(self._waiting) // engines))
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    @property
    def sequences_left(self) -> int:
        """Unfinished sequences at which an engine requests more: as many as it generates concurrently, while items
        wait; otherwise 0."""
        return self.concurrent_sequences if self._waiting else 0

    def _room(self, unfinished_sequences: int) -> int:
        """Items for which an engine has room."""
        spare = max(self.sequences, self.concurrent_sequences // _SPARE)
        return max(0, -(-(self.concurrent_sequences + spare - unfinished_sequences) // self.sequences))
