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
from rljob_trainer.rollout_batch import Completion, FloatArray, Prompt, RolloutBatch
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
        self._is_writable = spec.per_step > 0

    def step_scored(self, batch: RolloutBatch, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        samples = samples_of(batch, prompts, completions, self._spec.per_step, time.time())
        self._write(samples)
        if samples and self._is_due(batch.step):
            self._waiting[batch.step] = samples

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._show_all(self._waiting.pop(record.step, []))

    def evaluation_scored(
        self, step: int, prompts: Sequence[Prompt], completions: Sequence[Completion], rewards: FloatArray
    ) -> None:
        size = len(completions) // max(len(prompts), 1)
        chosen = at_even_distances(len(completions), self._spec.per_step)
        now = time.time()
        samples = [
            _sample(step, "evaluation", prompts[i // size], completions[i], float(rewards[i]), {}, None, now)
            for i in chosen
        ]
        self._write(samples)
        if self._spec.show_every_steps:
            self._show_all(samples)

    def _is_due(self, step: int) -> bool:
        every = self._spec.show_every_steps
        return every > 0 and (step == 1 or step % every == 0)

    def _show_all(self, samples: Sequence[Sample]) -> None:
        if samples:
            for show in self._show:
                show(samples)

    def _write(self, samples: Sequence[Sample]) -> None:
        if not samples or not self._is_writable:
            return
        data = b"".join(sample.model_dump_json().encode() + b"\n" for sample in samples)
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > LARGEST_FILE_BYTES:
                self._path.replace(earlier_samples(self._path))
            with self._path.open("ab") as file:
                if file.tell() and not _ends_with_newline(self._path):
                    file.write(b"\n")  # the last line was cut off by a crash
                file.write(data)
        except OSError as error:
            self._is_writable = False
            self._warn(f"{self._path} could not be written, and no more samples are kept: {error.strerror or error}")


def samples_of(
    batch: RolloutBatch, prompts: Sequence[Prompt], completions: Sequence[Completion], count: int, scored_at: float
) -> list[Sample]:
    """At most `count` responses of a scored step, of prompts at even distances. `scored_at`: seconds since the epoch.

    The choice depends on nothing but the numbers, so it is no selection of good or bad responses.
    """
    return [
        _sample(
            batch.step,
            "train",
            prompts[i // batch.group_size],
            completions[i],
            float(batch.rewards[i]),
            {name: _finite(parts[i]) for name, parts in batch.reward_parts.items()},
            _finite(batch.advantages[i]),
            scored_at,
        )
        for i in at_even_distances(len(completions), count)
    ]


def at_even_distances(length: int, count: int) -> list[int]:
    """At most `count` indices below `length`."""
    count = min(length, count)
    return [index * length // count for index in range(count)]


def _sample(
    step: int,
    kind: str,
    prompt: Prompt,
    completion: Completion,
    reward: float,
    rewards: Mapping[str, float | None],
    advantage: float | None,
    scored_at: float,
) -> Sample:
    return Sample.model_validate(
        {
            "step": step,
            "kind": kind,
            "prompt_index": prompt.index,
            "prompt": shortened_in_the_middle(prompt.text),
            "response": shortened_in_the_middle(completion.text),
            "reward": reward,
            "rewards": rewards,
            "advantage": advantage,
            "finished": completion.finished,
            "tokens": len(completion.token_ids),
            "scored_at": scored_at,
        }
    )


def shortened_in_the_middle(text: str) -> str:
    """The text, or its first three quarters and its end, where answers are."""
    if len(text) <= LONGEST_TEXT:
        return text
    first = LONGEST_TEXT * 3 // 4
    return f"{text[:first]} … {len(text) - LONGEST_TEXT:,} characters … {text[first - LONGEST_TEXT :]}"


def _finite(value: np.floating | float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
