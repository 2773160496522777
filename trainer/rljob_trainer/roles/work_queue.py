"""The queue from which engines take their work: longest first, and never more than keeps an engine busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_SPARE = 8
"""Reserve of an engine, as a divisor of the sequences that it generates at once: it requests more before it idles, but
not after every completed response."""


@dataclass(slots=True)
class WorkQueue:
    """Items that no engine has yet, such as groups of completions. Pure: it depends on the calls alone."""

    expected: Sequence[float]
    """Of each item, the expected time, in any unit."""

    concurrent_sequences: int
    """Sequences that an engine generates at once."""

    sequences: int = 1
    """Of each item."""

    _waiting: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = []
        self.put_back(range(len(self.expected)))

    def __len__(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    def put_back(self, items: Iterable[int]) -> None:
        """Add items, such as those of a lost engine. Of items that are expected to take equally long, the first in
        the step is the first here."""
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
        """Unfinished sequences at which an engine asks for more: those that it generates at once, while items wait."""
        return self.concurrent_sequences if self._waiting else 0

    def _room(self, unfinished_sequences: int) -> int:
        """Items for which an engine has room."""
        spare = max(self.sequences, self.concurrent_sequences // _SPARE)
        return max(0, -(-(self.concurrent_sequences + spare - unfinished_sequences) // self.sequences))
