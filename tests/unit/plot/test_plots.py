"""The plots of a run, and the memory timeline among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.memory_failure import DeviceMemory, FailureKind, MemoryFailure
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_client.errors import OutputUnavailable
from rljob_client.plot import plot_run
from rljob_client.plot.memory_timeline import Level, Timeline, memory_timeline
from rljob_client.plot.run_plots import timeline_marks
from rljob_client.plot.timeline_plot import draw_timeline
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_client.run_directory.records import PlanChangeRecord
from rljob_memory.sample import MemorySample
from rljob_testing.memory_plans import memory_plan
from tests.unit.ledger.samples import GIB, step_record, write_ledger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_ledger(tmp_path, [step / 20 for step in range(20)])
    return tmp_path


def svg(paths: list[Path], name: str) -> str:
    return next(path for path in paths if path.name == f"{name}.svg").read_text()


def test_four_pictures_state_the_result_as_png_and_svg(run: Path) -> None:
    ledger = run / "ledger.jsonl"
    growing = ledger.read_bytes() + b'{"kind": "step", "st'
    ledger.write_bytes(growing)
    paths = plot_run(run)
    assert ledger.read_bytes() == growing, "the ledger of an unfinished run is not modified"
    names = [f"{name}.{format}" for name in ("reward", "learning", "timing", "memory") for format in ("png", "svg")]
    assert paths == [run / "plots" / name for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    assert all("</svg>" in path.read_text() for path in paths if path.suffix == ".svg")
    assert "Reward rose from 0.100 to 0.850 in 20 steps" in svg(paths, "reward")
    timing = svg(paths, "timing")
    assert "A step took 1.00 s; rollout was 60% of it" in timing
    assert all(label in timing for label in ("rollout  60%", "update  30%", "between phases  10%"))
    assert "sync" not in timing, "a phase that took no time is left out"
    assert "Memory peaked at 2.00 GiB, in the rollout" in svg(paths, "memory")

    again = plot_run(run, run / "elsewhere" / "deep")
    assert {path.parent for path in again} == {run / "elsewhere" / "deep"}
    assert svg(again, "reward") == svg(paths, "reward")


@pytest.mark.parametrize("steps", [1, 2, 400])
def test_short_and_long_runs_are_drawn(tmp_path: Path, steps: int) -> None:
    write_ledger(tmp_path, [0.5] * steps)
    assert len(plot_run(tmp_path)) == 8


def test_without_a_step_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(OutputUnavailable, match=r"nothing to draw: .* is not the output of a run"):
        plot_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ledger.jsonl").write_text("")
    with pytest.raises(OutputUnavailable, match="nothing to draw yet"):
        plot_run(tmp_path)
    write_ledger(tmp_path, [])
    with pytest.raises(OutputUnavailable, match="no committed step"):
        plot_run(tmp_path)
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("samples", "shown", "absent"),
    [
        (
            [{"peak_reserved": 3 * GIB}, {"peak_reserved": 5 * GIB}],
            ["Memory peaked at 5.00 GiB, in the policy", "reserved by torch's allocator on one GPU"],
            "the GPU: 80 GiB",
        ),
        ([{"peak_reserved": 75 * GIB}], ["the GPU: 80 GiB"], "resident"),
        (
            [{"rss": GIB, "peak_rss": 2 * GIB, "device_total": 0}],
            ["Memory peaked at 2.00 GiB, in the policy", "resident host memory"],
            "the GPU",
        ),
    ],
    ids=["far from the limit", "near the limit", "without a GPU"],
)
def test_memory_logs_are_drawn_rather_than_the_ledgers_numbers(
    run: Path, samples: list[dict[str, Any]], shown: list[str], absent: str
) -> None:
    (run / "memory").mkdir()
    with (run / "memory" / "policy-0.jsonl").open("w") as log:
        for number, sample in enumerate(samples):
            line = {"step": 1, "phase": "update", "micro_batch": number, "device_total": 80 * GIB, "allocated": 0}
            log.write(json.dumps(line | sample) + "\n")
        log.write('{"step": 2, "pha')
    memory = svg(plot_run(run), "memory")
    assert all(text in memory for text in shown)
    assert absent not in memory


# --- the memory timeline ---


BEGUN = 1_000.0
CARD = 80 * GIB


def line(end: float, phase: str, *, began: float | None = None, step: int = 1, **gib: int) -> dict[str, Any]:
    times = {"time": BEGUN + end, "began": None if began is None else BEGUN + began}
    sizes = {name: size * GIB for name, size in gib.items()}
    return {**times, "step": step, "phase": phase, "micro_batch": None, "device_total": CARD, **sizes}


POLICY = [
    line(10, "load", began=0, step=0, allocated=8, reserved=9, peak_allocated=9, peak_reserved=10, device_free=69),
    line(50, "update", began=40, allocated=8, reserved=12, peak_allocated=40, peak_reserved=45, device_free=64),
]
ROLLOUT = [
    line(30, "load", began=10, step=0, allocated=20, reserved=20, peak_reserved=22, device_free=49),
    line(38, "rollout", began=30, allocated=20, reserved=20, peak_allocated=20, peak_reserved=20, device_free=49),
    line(39, "update", allocated=20, reserved=20, asleep=19, device_free=68),
]


def sample(line: dict[str, Any]) -> MemorySample:
    found = MemorySample.from_line({"allocated": 0, **line})
    assert found is not None
    return found


def timeline_of(attempts: Sequence[float] = (), **lines: list[dict[str, Any]]) -> Timeline:
    """`lines`: by role and rank, such as policy_0."""
    samples = [(actor.replace("_", "-"), sample(one)) for actor, each in lines.items() for one in each]
    timeline = memory_timeline(samples, [*attempts])
    assert timeline is not None
    return timeline


def at(timeline: Timeline, seconds: float) -> dict[str, tuple[int, int]]:
    """GiB in use and held, by role."""
    moment = [one for one in timeline.moments if one.time <= BEGUN + seconds][-1]
    return {role: (level.in_use // GIB, level.held // GIB) for role, level in moment.levels.items()}


def test_each_role_shows_the_peak_of_a_phase_and_then_the_rest() -> None:
    timeline = timeline_of(policy_0=POLICY, rollout_0=ROLLOUT)
    policy = [at(timeline, seconds)["policy"] for seconds in (5, 11, 45, 51)]
    assert policy == [(9, 10), (8, 9), (40, 45), (8, 12)]
    assert [at(timeline, seconds)["rollout"] for seconds in (35, 45)] == [(20, 20), (1, 1)], "a sleeping engine"
    assert timeline.moments[-1].others == CARD - 64 * GIB - 12 * GIB - GIB, "memory outside the job"
    fullest = timeline.fullest
    assert (fullest.step, fullest.phase, fullest.levels["policy"]) == (1, "update", Level(40 * GIB, 45 * GIB))


def test_micro_batches_show_the_growth_to_the_peak() -> None:
    parts = [
        line(end, "update", began=40, allocated=8, reserved=held, peak_allocated=held - 1, peak_reserved=held)
        | {"micro_batch": number}
        for number, (end, held) in enumerate([(42, 20), (44, 30), (46, 45)])
    ]
    timeline = timeline_of(policy_0=[POLICY[0], *parts, POLICY[1]], rollout_0=ROLLOUT)
    assert [at(timeline, second)["policy"][1] for second in (41, 43, 45, 47)] == [20, 30, 45, 45]


def test_processes_end_after_their_last_sample_or_with_the_next_attempt() -> None:
    again = [one | {"time": one["time"] + 100, "began": one["began"] + 100} for one in POLICY]
    timeline = timeline_of([BEGUN - 1, BEGUN + 90], policy_0=[*POLICY, *again], rollout_0=ROLLOUT)
    assert set(at(timeline, 55)) == {"policy", "rollout"}
    assert at(timeline, 65) == at(timeline, 95) == {}, "the run was stopped meanwhile"
    assert set(at(timeline, 105)) == {"policy"}
    timeline = timeline_of([BEGUN - 1, BEGUN + 52], policy_0=POLICY, rollout_0=ROLLOUT)
    assert set(at(timeline, 51)) == {"policy", "rollout"}
    assert at(timeline, 53) == {}


def test_logs_without_phase_starts_are_drawn_from_line_to_line(tmp_path: Path) -> None:
    old = [{name: value for name, value in one.items() if name not in ("began", "asleep")} for one in POLICY]
    (tmp_path / "policy-0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in old))
    timeline = memory_timeline(logged_samples(tmp_path), [])
    assert timeline is not None
    assert at(timeline, 30)["policy"] == (40, 45)


def test_without_a_gpu_resident_memory_is_drawn_and_of_several_the_fullest() -> None:
    line = {"time": BEGUN + 5, "began": BEGUN, "step": 1, "phase": "update", "micro_batch": None}
    timeline = timeline_of(policy_0=[line | {"rss": GIB, "peak_rss": 2 * GIB, "host_limit": 4 * GIB}])
    assert (timeline.counts, timeline.limit_bytes, timeline.fullest.total) == ("host", 4 * GIB, 2 * GIB)
    assert timeline_of(policy_0=POLICY, policy_1=[one | {"peak_reserved": 70 * GIB} for one in POLICY]).rank == 1


numbers = st.integers(0, 100 * GIB)
lines = st.fixed_dictionaries(
    {"time": st.floats(0, 1e9), "phase": st.sampled_from(["load", "update", "sync"])},
    optional={
        "began": st.none() | st.floats(0, 1e9),
        "step": st.integers(0, 9),
        "micro_batch": st.none() | st.integers(0, 9),
        **{
            name: numbers
            for name in ("allocated", "reserved", "peak_allocated", "peak_reserved", "device_free", "asleep", "rss")
        },
        "device_total": st.sampled_from([0, CARD]),
    },
)


@given(
    st.lists(st.tuples(st.sampled_from(["policy-0", "rollout-0", "policy-1", "odd"]), lines), max_size=30),
    st.lists(st.floats(0, 1e9), max_size=3),
)
def test_columns_cover_the_time_and_no_size_is_negative_for_any_logs(
    samples: list[tuple[str, dict[str, Any]]], attempts: list[float]
) -> None:
    timeline = memory_timeline([(actor, sample(one)) for actor, one in samples], attempts)
    if timeline is None:
        assert all(actor == "odd" or one.get("micro_batch") is not None for actor, one in samples)
        return
    times = [moment.time for moment in timeline.moments]
    assert times == sorted(times)
    columns = timeline.columns([*map(float, np.linspace(timeline.begin, timeline.end, 51))])
    assert len(columns) == 50
    assert max(column.total for column in columns) == timeline.fullest.total
    for moment in timeline.moments:
        assert all(0 <= level.in_use <= level.held for level in moment.levels.values())
        assert moment.others >= 0


# --- the picture ---

PLAN = memory_plan(micro_batch_tokens=1024, logprob_chunk_tokens=256, sync_bucket_bytes=GIB, generation=2)


def plan_change(seconds: float, *, preventive: bool = False) -> PlanChange:
    return PlanChange(
        generation=2,
        time=datetime.fromtimestamp(BEGUN + seconds, UTC),
        attempt=1,
        step=1,
        phase="update",
        role="policy",
        diagnosis=DiagnosisStatus(class_name="ActivationSpike", confidence=0.7, message="it was full"),
        remedy=RemedyStatus(setting="syncBucketSize", before="2Gi", after="1Gi"),
        level="Live",
        preventive=preventive,
    )


@pytest.fixture
def failed_run(tmp_path: Path) -> Path:
    """A run that failed in its first step, and whose plan was changed."""
    (tmp_path / "memory").mkdir()
    for actor, samples in (("policy-0", POLICY), ("rollout-0", ROLLOUT)):
        (tmp_path / "memory" / f"{actor}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in samples))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin_attempt(BEGUN - 1, {}, {}, {})
        ledger.record(PlanChangeRecord(change=plan_change(49), plan=PLAN))
    return tmp_path


def test_a_run_that_failed_in_its_first_step_has_a_timeline(failed_run: Path) -> None:
    paths = plot_run(failed_run)
    assert [path.name for path in paths] == ["memory_timeline.png", "memory_timeline.svg"]
    picture = paths[1].read_text()
    assert "Memory of GPU 0 peaked in step 1's update: 48.0 of 80.0 GiB" in picture
    assert "ActivationSpike: syncBucketSize 2Gi → 1Gi" in picture
    assert "the GPU: 80 GiB" in picture
    assert all(label in picture for label in ("policy, cached", "rollout", "others", "load", "update"))
    with Ledger(failed_run / "ledger.jsonl") as ledger:
        ledger.commit(step_record(1))
    stems = {path.stem for path in plot_run(failed_run)}
    assert stems == {"reward", "learning", "timing", "memory", "memory_timeline"}


@pytest.mark.parametrize("steps", [2, 300])
def test_a_run_of_any_length_has_the_strip_of_phases(steps: int) -> None:
    updates = [line(10 + step, "update", began=9 + step, step=step, peak_reserved=9) for step in range(1, steps + 1)]
    timeline = timeline_of(policy_0=updates)
    figure = draw_timeline(timeline, [], [])
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == ["update"]
        assert axes.get_title(loc="left")
        assert "step" in axes.get_xlabel()


def test_a_failure_that_a_change_answers_is_marked_once(tmp_path: Path) -> None:
    for seconds in (49, 500):
        account = MemoryFailure(
            kind=FailureKind.ALLOCATOR,
            time=datetime.fromtimestamp(BEGUN + seconds, UTC),
            device=DeviceMemory(requested_bytes=3 * GIB),
        )
        (tmp_path / f"policy-0-step{seconds}.json").write_text(account.model_dump_json(by_alias=True))
    (tmp_path / "policy-0-step9.json").write_text("torn")
    marks = timeline_marks([plan_change(60), plan_change(80, preventive=True)], tmp_path)
    assert [(mark.time - BEGUN, mark.failure) for mark in marks] == [(60, True), (80, False), (500, True)]
    assert marks[-1].text == "out of memory: 3.00 GiB requested"
