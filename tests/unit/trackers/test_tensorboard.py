from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.trackers.tracked import attempt, sample


def read(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(each.step, round(each.value, 3)) for each in events.Scalars(tag)]


def text(events: EventAccumulator, tag: str) -> str:
    return "\n".join(each.tensor_proto.string_val[0].decode() for each in events.Tensors(tag))


def test_steps_evaluations_samples_notes_and_the_summary_are_in_the_event_files(tmp_path: Path) -> None:
    with attempt(tmp_path, name="tensorboard") as run:
        run.commit(1, 0.1, metrics={"loss": 0.25, "rewards/format": 0.5})
        run.evaluate(1)
        run.listener.samples([sample(1)])
        run.recover(1)
        run.commit(2, 0.2)
    events = read(tmp_path / "tensorboard")
    assert scalars(events, "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert scalars(events, "rewards/format") == [(1, 0.5)]
    assert scalars(events, "evaluation/avg@8") == [(1, 0.75)]
    assert scalars(events, "memory/rollout") == [(1, 2.0), (2, 2.0)]
    assert [event.wall_time for event in events.Scalars("loss")] == [1001.0, 1002.0]
    assert "| 4 + 3 = | It is \\| 7.<br>Yes. | 1.0 |" in text(events, "samples/train")
    assert "resumed at step 1" in text(events, "notes/Recovered")
    assert "status: Complete" in text(events, "summary")
    assert '"uri": "hf://org/name"' in text(events, "manifest")
    assert "in-plain-text" not in text(events, "manifest")


@pytest.mark.parametrize("unreported", [1, 2])
def test_a_resumed_run_continues_after_the_last_reported_record(tmp_path: Path, unreported: int) -> None:
    """An evaluation that was not reported leaves the numbers of its step."""
    with attempt(tmp_path, finish=False, name="tensorboard") as killed:
        killed.commit(1, 0.1)
        killed.commit(2, 0.2)
        killed.evaluate(2)
    state = tmp_path / ".trackers" / "tensorboard.json"
    state.write_text(state.read_text().replace('"records": 3', f'"records": {3 - unreported}'))
    with attempt(tmp_path, killed.records, name="tensorboard") as resumed:
        resumed.commit(3, 0.3)
    events = read(tmp_path / "tensorboard")
    assert scalars(events, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert scalars(events, "evaluation/avg@8")[-1] == (2, 0.75)


def test_a_directory_that_is_given_later_gets_all_steps(tmp_path: Path) -> None:
    with attempt(tmp_path, finish=False, name="tensorboard") as first:
        first.commit(1, 0.1)
        first.evaluate(1)
    with attempt(tmp_path, first.records, name="tensorboard", args={"logdir": "elsewhere"}) as other:
        other.commit(2, 0.2)
    events = read(tmp_path / "elsewhere")
    assert scalars(events, "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert scalars(events, "evaluation/reward_mean") == [(1, 0.75)]
