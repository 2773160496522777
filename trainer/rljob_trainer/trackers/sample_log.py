"""Keeps a few responses of each step in `samples.jsonl`, and shows those of some steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rljob_api.plan_change import Phase
from rljob_api.tracking import SamplesSpec
from rljob_client.run_directory.records import StepRecord
from rljob_client.run_directory.samples import Sample, earlier_samples
from rljob_memory.sample import MemorySample
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch
from rljob_trainer.run_listener import RunListener

Show = Callable[[Sequence[Sample]], None]

LONGEST_TEXT = 8000
"""Characters of a prompt or a response that are kept."""

LARGEST_FILE_BYTES = 64 << 20
"""Size at which the file is renamed, and replaces the one renamed before."""


class SampleLog(RunListener):
    """Writes samples when a step is scored; shows them when it is committed. Never fails."""

    def __init__(self, path: Path, spec: SamplesSpec, show: Sequence[Show], warn: Callable[[str], None]) -> None:
        """`show`: receives the samples of the steps to show, of one kind and step each. `warn`: displays a warning."""
        self._path, self._spec, self._show, self._warn = path, spec, show, warn
        self._waiting: dict[int, list[Sample]] = {}
        self._is_writable = True

    def step_scored(self, batch: RolloutBatch, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        chosen = at_even_distances(len(completions), self._spec.per_step)
        parts = {i: {name: _finite(of[i]) for name, of in batch.reward_parts.items()} for i in chosen}
        samples = [
            sample_of(prompts[i // batch.group_size], completions[i]).model_copy(
                update={
                    "step": batch.step,
                    "reward": float(batch.rewards[i]),
                    "rewards": parts[i],
                    "advantage": _finite(batch.advantages[i]),
                }
            )
            for i in chosen
        ]
        self._write(samples)
        every = self._spec.show_every_steps
        if every and (batch.step == 1 or batch.step % every == 0):
            self._waiting[batch.step] = samples

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._show_all(self._waiting.pop(record.step, []))

    def evaluation_scored(
        self, step: int, rewards: Sequence[float], prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> None:
        samples = [
            sample_of(prompts[i * len(prompts) // len(completions)], completions[i]).model_copy(
                update={"step": step, "kind": "evaluation", "reward": float(rewards[i])}
            )
            for i in at_even_distances(len(completions), self._spec.per_step)
        ]
        self._write(samples)
        if self._spec.show_every_steps:
            self._show_all(samples)

    def _show_all(self, samples: Sequence[Sample]) -> None:
        for show in self._show if samples else ():
            show(samples)

    def _write(self, samples: list[Sample]) -> None:
        """Append the samples, which were scored together."""
        now = time.time()
        samples[:] = [sample.model_copy(update={"scored_at": now}) for sample in samples]
        data = b"".join(sample.model_dump_json().encode() + b"\n" for sample in samples)
        if not data or not self._is_writable:
            return
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > LARGEST_FILE_BYTES:
                self._path.replace(earlier_samples(self._path))
            with self._path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, 2)
                    data = data if file.read(1) == b"\n" else b"\n" + data  # a crash has cut the last line off
                file.write(data)
        except OSError as error:
            self._is_writable = False
            self._warn(f"{self._path} could not be written, and no more samples are kept: {error.strerror or error}")


def at_even_distances(length: int, count: int) -> list[int]:
    """At most `count` indices below `length`. The choice depends on nothing else, so it is no selection of good or bad
    responses."""
    count = min(length, count)
    return [index * length // count for index in range(count)]


def sample_of(prompt: Prompt, completion: Completion) -> Sample:
    """The sample without step and reward."""
    return Sample(
        step=0,
        kind="train",
        prompt_index=prompt.index,
        prompt=shortened_in_the_middle(prompt.text),
        response=shortened_in_the_middle(completion.text),
        reward=0.0,
        advantage=None,
        finished=completion.finished,
        tokens=len(completion.token_ids),
    )


def shortened_in_the_middle(text: str) -> str:
    """The text, or its first three quarters and its end, where answers are."""
    if len(text) <= LONGEST_TEXT:
        return text
    first = LONGEST_TEXT * 3 // 4
    return f"{text[:first]} … {len(text) - LONGEST_TEXT:,} characters … {text[first - LONGEST_TEXT :]}"


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None
