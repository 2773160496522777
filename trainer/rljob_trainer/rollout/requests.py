"""Requests that an engine is generating. Others can join them between two decoding steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

_STEPS_IN_FLIGHT = 4
"""More than vLLM schedules ahead (`EngineCore.batch_queue_size`). A step without requests costs next to nothing."""


class Requests:
    """The loop of `vllm.LLM.generate`, one decoding step at a time."""

    def __init__(self, llm: Any) -> None:
        """`llm`: a `vllm.LLM`."""
        self._llm = llm
        self._numbers = count()
        self._places: dict[str, int] = {}
        """Place of each unfinished request in the caller's order, by the request's id."""

    @property
    def unfinished_sequences(self) -> int:
        """Those that are being generated, and those that wait in the engine."""
        return int(self._llm.llm_engine.get_num_unfinished_requests())

    def add(self, place: int, prompt: Sequence[int], sampling: Any) -> None:
        """Add a request. `place`: returned with its output. `sampling`: SamplingParams, of the final output only."""
        from vllm.inputs import tokens_input

        request_id = str(next(self._numbers))
        self._llm.llm_engine.add_request(request_id, tokens_input(list(prompt)), sampling)
        self._places[request_id] = place

    def step(self) -> list[tuple[int, Any]]:
        """Generate one token of each running sequence. Returns the place and the output of each request that ended."""
        outputs = self._llm.llm_engine.step()
        return [(self._places.pop(output.request_id), output) for output in outputs if output.finished]

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Any]) -> list[Any]:
        """The outputs of requests that no others join, in their order."""
        for place, (prompt, parameters) in enumerate(zip(prompts, sampling, strict=True)):
            self.add(place, prompt, parameters)
        found: dict[int, Any] = {}
        while self._places:
            found.update(self.step())
        return [found[place] for place in range(len(prompts))]

    def abandon(self) -> None:
        """Drop all unfinished requests, and the tokens of those that the engine is generating."""
        if not self._places:
            return
        self._llm.llm_engine.abort_request(list(self._places))
        self._places.clear()
        for _ in range(_STEPS_IN_FLIGHT):
            self._llm.llm_engine.step()
