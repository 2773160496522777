"""The memory timeline of a run, from its memory logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rljob_client.report.memory_timeline import Level, Timeline, memory_timeline
from rljob_client.report.timeline_chart import clock_of, timeline_chart
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_memory.sample import MemorySample
from tests.unit.ledger.samples import GIB

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
def test_time_moves_forward_and_no_size_is_negative_for_any_logs(
    samples: list[tuple[str, dict[str, Any]]], attempts: list[float]
) -> None:
    timeline = memory_timeline([(actor, sample(one)) for actor, one in samples], attempts)
    if timeline is None:
        assert all(actor == "odd" or one.get("micro_batch") is not None for actor, one in samples)
        return
    times = [moment.time for moment in timeline.moments]
    assert times == sorted(times)
    clock = clock_of(timeline)
    minutes = [clock.at(time) for time in times]
    assert minutes == sorted(minutes)
    assert minutes[0] == 0
    assert timeline_chart(timeline, [], attempts).traces or timeline.fullest.total == 0
    for moment in timeline.moments:
        assert all(0 <= level.in_use <= level.held for level in moment.levels.values())
        assert moment.others >= 0
