"""Expected lengths of responses, from those of earlier steps: engines begin with the longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rljob_trainer.rollout_batch import Prompt


@dataclass(slots=True)
class ResponseLengths:
    """Response lengths by item of the task, in tokens."""

    _of_item: dict[int, float] = field(default_factory=dict, init=False)
    """Mean of the last group of each item."""
    _tokens: int = field(default=0, init=False)
    _responses: int = field(default=0, init=False)

    def observe(self, items: Iterable[int], lengths: Sequence[int], group_size: int) -> None:
        """Learn the lengths of the responses of a step, group after group. `items`: indices in the task."""
        for place, item in enumerate(items):
            group = lengths[place * group_size : (place + 1) * group_size]
            self._of_item[item] = sum(group) / len(group)
        self._tokens += sum(lengths)
        self._responses += len(lengths)

    def expected(self, prompts: Iterable[Prompt]) -> list[float]:
        """For each prompt, the mean length in the last epoch that had its item; otherwise that of all responses.

        If nothing is known, all are equal. The estimate affects only the order of prompts, never the responses.
        """
        mean = self._tokens / self._responses if self._responses else 1.0
        return [self._of_item.get(prompt.index, mean) for prompt in prompts]
