from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rljob_api.tracking import SamplesSpec
from rljob_client.run_directory.samples import Sample, earlier_samples, read_samples
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch
from rljob_trainer.trackers import sample_log
from rljob_trainer.trackers.sample_log import LONGEST_TEXT, SampleLog, at_even_distances, shortened_in_the_middle
from tests.unit.ledger.samples import step_record

PROMPTS = [Prompt(index=10 + number, token_ids=[1], text=f"prompt {number}") for number in range(4)]
COMPLETIONS = [
    Completion([1, 2, 3], [0.0] * 3, finished=number % 2 == 0, text=f"response {number}") for number in range(8)
]


def batch(step: int) -> RolloutBatch:
    scored = RolloutBatch.of(step, 2, PROMPTS, COMPLETIONS).scored(
        np.arange(8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
    )
    parts = np.arange(8, dtype=np.float32)
    parts[0] = np.nan
    return replace(scored, reward_parts={"format": parts})


class Shown:
    def __init__(self, path: Path, **spec: int) -> None:
        self.path = path / "samples.jsonl"
        self.shown: list[list[int]] = []
        self.warnings: list[str] = []
        self.log = SampleLog(self.path, SamplesSpec(**spec), [self.show], self.warnings.append)

    def show(self, samples: object) -> None:
        assert isinstance(samples, list)
        self.shown.append([sample.step for sample in samples])

    def score(self, step: int) -> None:
        self.log.step_scored(batch(step), PROMPTS, COMPLETIONS)

    def commit(self, step: int) -> None:
        self.log.step_committed(step_record(step), {})


def test_responses_of_prompts_at_even_distances_are_kept_with_all_facts(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=4)
    run.score(1)
    first, *others = read_samples(run.path)
    assert first == Sample(
        step=1,
        kind="train",
        prompt_index=10,
        prompt="prompt 0",
        response="response 0",
        reward=0.0,
        rewards={"format": None},
        advantage=-1.0,
        finished=True,
        tokens=3,
        scored_at=first.scored_at,
    )
    assert [sample.response for sample in others] == ["response 2", "response 4", "response 6"]
    assert at_even_distances(3, 8) == [0, 1, 2]


def test_samples_are_shown_after_the_first_step_and_then_every_n_steps(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=1, show_every_steps=2)
    for step in (1, 2, 3, 4):
        run.score(step)
        run.score(step + 1)  # a step may be scored before its predecessor is committed, or twice
        run.commit(step)
    assert run.shown == [[1], [2], [4]]
    silent = Shown(tmp_path / "run", per_step=1, show_every_steps=0)
    silent.path.parent.mkdir()
    silent.score(1)
    silent.commit(1)
    assert silent.shown == []
    assert len(read_samples(silent.path)) == 1


def test_nothing_is_written_or_shown_if_no_text_is_to_be_kept(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=0)
    run.score(1)
    run.commit(1)
    run.log.evaluation_scored(1, [1.0] * 8, PROMPTS, COMPLETIONS)
    assert (run.shown, run.path.exists()) == ([], False)


def test_the_later_scoring_of_a_step_replaces_the_earlier_one(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=2)
    run.score(1)
    run.score(1)
    run.score(2)
    again = read_samples(run.path)
    assert [sample.step for sample in again] == [1, 1, 2, 2]
    assert again[0].scored_at == max(sample.scored_at for sample in again if sample.step == 1)
    assert [sample.step for sample in read_samples(run.path, step=2)] == [2, 2]


def test_an_evaluation_is_kept_beside_the_step(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=2)
    run.score(1)
    run.log.evaluation_scored(1, [float(reward) for reward in range(8)], PROMPTS, COMPLETIONS)
    evaluated = [sample for sample in read_samples(run.path) if sample.kind == "evaluation"]
    assert [(each.prompt_index, each.reward, each.advantage) for each in evaluated] == [
        (10, 0.0, None),
        (12, 4.0, None),
    ]
    assert run.shown == [[1, 1]]


def test_a_full_file_is_renamed_and_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Shown(tmp_path, per_step=1)
    run.score(1)
    monkeypatch.setattr(sample_log, "LARGEST_FILE_BYTES", run.path.stat().st_size)
    for step in (2, 3):
        run.score(step)
    assert [sample.step for sample in read_samples(earlier_samples(run.path))] == [2]
    assert [sample.step for sample in read_samples(run.path)] == [2, 3]


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=1)
    run.score(1)
    run.path.write_bytes(run.path.read_bytes() + b'{"step": 2, "kind": "tr')
    run.score(2)
    assert [sample.step for sample in read_samples(run.path)] == [1, 2]


def test_a_file_that_cannot_be_written_causes_one_warning(tmp_path: Path) -> None:
    run = Shown(tmp_path, per_step=1)
    run.path.mkdir()
    run.score(1)
    run.score(2)
    run.commit(1)
    assert len(run.warnings) == 1
    assert "no more samples are kept" in run.warnings[0]
    assert run.shown == [[1]]


def test_a_long_text_keeps_its_start_and_its_end() -> None:
    text = "a" * 6000 + "b" * 10_000 + "c" * 2000
    cut = shortened_in_the_middle(text)
    assert cut == f"{'a' * 6000} … 10,000 characters … {'c' * 2000}"
    assert shortened_in_the_middle("a" * LONGEST_TEXT) == "a" * LONGEST_TEXT
