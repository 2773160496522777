"""The block of goals: each with its aim, the recorded result, and the cause if it is missed.

`GOALS` is the only list of them. Results, and if they meet the aim, are read from `bench/results/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.report.markdown import GIB, Result, Row, gib, has_result, read, table
from bench.report.public_failures import SETS

YES, NO, NOT_MEASURED = "yes", "no", "not measured"


@dataclass(frozen=True)
class Bound:
    """The limit of a value."""

    limit: float
    """In the unit of the value."""
    is_minimum: bool = False
    """The value must be at least the limit, not at most."""

    def allows(self, value: float) -> bool:
        return value >= self.limit if self.is_minimum else value <= self.limit


@dataclass(frozen=True)
class Reading:
    """A recorded value, in the unit of the goal's bound."""

    value: float
    """The value, or the least that it can be."""
    text: str
    """The value in the table, with its unit."""
    highest: float | None = None
    """The most that the value can be, if the record does not determine it; None: it does."""


@dataclass(frozen=True)
class Goal:
    """One goal of the project."""

    subject: str
    """Model, hardware and quantity, as in the table."""
    aim: str
    """The bound in words, with its unit."""
    bound: Bound
    """The bound that the recorded value must keep."""
    results: tuple[str, ...]
    """Names of the results that the value is read from. The goal is not measured until all of them exist."""
    reading: Callable[..., Reading | None]
    """Reads the value from these results, one argument each; None if they do not contain it."""
    record: str
    """Markdown link to the section that shows the results."""
    cause: str = "Cause not examined."
    """Sentence with the cause of a goal that is missed or not measured, as far as records and documentation name it."""


def block() -> str:
    """A row for each goal, and the cause of each that is not met."""
    return rendered(GOALS)


def rendered(goals: Sequence[Goal]) -> str:
    found = [(goal, reading_of(goal)) for goal in goals]
    outcomes = [outcome(goal.bound, reading) for goal, reading in found]
    rows = [
        (goal.subject, goal.aim, reading.text if reading else "–", met, goal.record)
        for (goal, reading), met in zip(found, outcomes, strict=True)
    ]
    counts = f"Met: {outcomes.count(YES)} of {len(goals)} goals."
    causes = [_causes(goals, outcomes, head, met) for head, met in (("Missed", NO), ("Not measured", NOT_MEASURED))]
    return f"{counts}\n\n{table(('goal', 'aim', 'result', 'met', 'record'), rows)}{''.join(causes)}"


def _causes(goals: Sequence[Goal], outcomes: Sequence[str], head: str, outcome: str) -> str:
    """A list of the goals with this outcome; empty if there is none."""
    items = [
        f"- **{goal.subject}.** {goal.cause}\n" for goal, met in zip(goals, outcomes, strict=True) if met == outcome
    ]
    return f"\n{head}, and why:\n\n{''.join(items)}" if items else ""


def reading_of(goal: Goal) -> Reading | None:
    """The recorded value; None if it is not recorded."""
    return goal.reading(*map(read, goal.results)) if all(map(has_result, goal.results)) else None


def outcome(bound: Bound, reading: Reading | None) -> str:
    """`yes` or `no`; `not measured` without a reading, or if both the least and the most are possible and differ."""
    if reading is None:
        return NOT_MEASURED
    allowed = {bound.allows(value) for value in (reading.value, reading.highest) if value is not None}
    return NOT_MEASURED if len(allowed) > 1 else YES if allowed.pop() else NO


def _arm(result: Result, name: str) -> Row | None:
    return next((row for row in result["rows"] if row["arm"] == name), None)


def _step(arm: str) -> Callable[[Result], Reading | None]:
    """Seconds per step of an arm."""

    def reading(result: Result) -> Reading | None:
        row = _arm(result, arm)
        if row is None or "seconds_per_step" not in row:
            return None
        return Reading(row["seconds_per_step"], f"{row['seconds_per_step']:.1f} s")

    return reading


def _trains(arm: str) -> Callable[[Result], Reading | None]:
    """1 if the arm committed all its steps, otherwise 0."""

    def reading(result: Result) -> Reading | None:
        row = _arm(result, arm)
        if row is None:
            return None
        is_complete = row["message"] == "all steps are committed" and "seconds_per_step" in row
        return Reading(1, f"{row['seconds_per_step']:.1f} s per step") if is_complete else Reading(0, "failed")

    return reading


def _peak_gpu(arm: str) -> Callable[[Result], Reading | None]:
    """Peak memory of the whole GPU, in GiB."""

    def reading(result: Result) -> Reading | None:
        row = _arm(result, arm)
        if row is None:
            return None
        return Reading(row["device_peak_bytes"] / GIB, gib(row["device_peak_bytes"]))

    return reading


def _first_step(arm: str) -> Callable[[Result], Reading | None]:
    """Seconds of the start-up and the first step."""

    def reading(result: Result) -> Reading | None:
        row = _arm(result, arm)
        if row is None:
            return None
        start, first = row["start_up_seconds"], row["all_seconds"][0]
        return Reading(start + first, f"{start + first:.0f} s ({start:.0f} + {first:.0f})")

    return reading


def _speed_up(arm: str, reference: str) -> Callable[[Result], Reading | None]:
    """Tokens per second of an arm, as a multiple of another's."""

    def reading(result: Result) -> Reading | None:
        rows = [_arm(result, name) for name in (arm, reference)]
        if any(row is None or "tokens_per_second" not in row for row in rows):
            return None
        ours, theirs = (row["tokens_per_second"] for row in rows if row is not None)
        return Reading(ours / theirs, f"{ours / theirs:.2f} ×")

    return reading


def _highest_reward(result: Result) -> Reading:
    """The highest mean reward of five successive steps."""
    [row] = result["rows"]
    highest = max(fmean(row["rewards"][end - 5 : end]) for end in range(5, row["steps"] + 1))
    return Reading(highest, f"{highest:.2f}; {row['last_reward']:.2f} in the last five of {row['steps']} steps")


def _live_recoveries(result: Result) -> Reading | None:
    """The longest live recovery in seconds. The record includes the retried phase, which takes between nothing and a
    whole step without a failure."""
    rows = [row for row in result["rows"] if row["arm"] == "live" and "failed" not in row]
    if not rows:
        return None
    text = ", ".join(f"{row['seconds_lost']:.1f} s ({row['failure']})" for row in rows)
    return Reading(
        max(row["seconds_lost"] - row["calm_step_seconds"] for row in rows),
        f"{text}, each with the retried phase",
        max(row["seconds_lost"] for row in rows),
    )


def _lost_engine(result: Result) -> Reading | None:
    lost = [row["seconds_lost"] for row in result["rows"] if row.get("failure") == "engine killed"]
    return Reading(lost[0], f"{lost[0]:.1f} s") if lost else None


def _of_all_cases(result: Result) -> Row:
    rows: dict[str, Row] = {row["class"]: row for row in result["rows"]}
    return rows["all"]


def _right_share(result: Result) -> Reading:
    row = _of_all_cases(result)
    right, cases = row["right"], row["cases"]
    return Reading(100 * right / cases, f"{right} of {cases} ({100 * right / cases:.0f} %)")


def _cases(count: str) -> Callable[[Result], Reading]:
    """A count of all cases."""
    return lambda result: Reading(_of_all_cases(result)[count], str(_of_all_cases(result)[count]))


_CLASS_OF_FAILURE = {"update": "ActivationSpike", "awake": "EngineNotAsleep", "engine-too-large": "KVCacheOversized"}
"""Failures of `trl_failures` and `verl_failures`, and their class."""


def _recovered_failures(*results: Result) -> Reading:
    """Failures that each of their measurements diagnosed correctly and completed in the second attempt."""
    rows = [row for result in results for row in result["rows"]]
    recovered = [
        all(_is_recovered(row) for row in rows if row["failure"] == failure)
        for failure in _CLASS_OF_FAILURE
        if any(row["failure"] == failure for row in rows)
    ]
    return Reading(sum(recovered), f"{sum(recovered)} of {len(_CLASS_OF_FAILURE)}")


def _is_recovered(row: Row) -> bool:
    first, *later = row["attempts"]
    is_right = first.get("class") == _CLASS_OF_FAILURE[row["failure"]]
    return is_right and len(later) == 1 and later[0]["exit_code"] == 0


def _cost(percent: float, text: str) -> Reading:
    """A share of a step. A negative cost is noise, and the cost can be as large as the noise."""
    return Reading(percent, f"{text} (noise)", -percent) if percent < 0 else Reading(percent, text)


def _probe(result: Result) -> Reading | None:
    row = _arm(result, "added")
    if row is None:
        return None
    return _cost(row["step_percent"], f"{row['step_percent']:+.1f} % of a short step on a CPU")


def _memory_log(result: Result) -> Reading | None:
    row = _arm(result, "samples alone")
    if row is None or "error" in row:
        return None
    return Reading(row["share_percent"], f"{row['share_percent']:.2f} % of an update")


def _mitigations(result: Result) -> Reading:
    rows = {row["arm"]: row for row in result["rows"]}
    default, none = (rows[arm]["without_generation_seconds"] for arm in ("default plan, again", "none of them"))
    percent = 100 * (default - none) / (rows["generation"]["generate_seconds"] + default)
    return _cost(percent, f"{percent:+.1f} % of a step")


def _operator_memory(result: Result) -> Reading:
    [row] = result["rows"]
    megabytes = row["peak_bytes"]["operator"] / 1e6
    return Reading(megabytes, f"{megabytes:.0f} MB")


def _incomplete_jobs(result: Result) -> Reading:
    [row] = result["rows"]
    return Reading(row["jobs"] - row["complete"], f"{row['complete']} of {row['jobs']}")


_NEWEST_SET = f"public_failures_{SETS[-1]}"
_TRAINS = Bound(1, is_minimum=True)
_NONE = Bound(0)
_H200 = "[large models](#large-models-on-one-h200)"
_H100 = "[H100](#large-models-on-one-h100-of-80-gb)"
_TWO_GPUS = "[two GPUs](topologies.md#measurements-on-two-gpus)"
_RECOVERY = "[two policy ranks](#time-to-recover-two-policy-ranks-on-two-h200s)"
_ACCURACY = "[accuracy](diagnose.md#accuracy)"
_ADAPTERS_OF_TRAINERS = "[other trainers](other-trainers.md#adapters-for-trl-and-verl)"

GOALS: Sequence[Goal] = (
    Goal(
        "8B, one H200: a step",
        "≤ 22 s",
        Bound(22),
        ("large_models",),
        _step("8b"),
        _H200,
        "The update runs at about half of the GPU's peak FLOP/s (calculated, six for each parameter and token), and "
        "the rollout takes 9 ms for each of its 1,024 tokens.",
    ),
    Goal("8B, one H200: peak GPU memory", "≤ 90 GiB", Bound(90), ("large_models",), _peak_gpu("8b"), _H200),
    Goal(
        "8B, one H200: start-up and first step, empty compile caches",
        "≤ 90 s",
        Bound(90),
        ("large_models",),
        _first_step("8b"),
        _H200,
        "Two thirds of the start-up are the start of the engine, half of that torch.compile; the first step compiles "
        "the policy's layers.",
    ),
    Goal(
        "8B, one H200: start-up and first step, warm compile caches",
        "≤ 90 s",
        Bound(90),
        ("large_models",),
        _first_step("8b-warm"),
        _H200,
    ),
    Goal("8B, one GPU of 80 GB: a step", "≤ 30 s", Bound(30), ("h100/large_models",), _step("8b"), _H100),
    Goal(
        "8B, two H200s, colocated: a step",
        "≤ 11 s",
        Bound(11),
        ("topologies",),
        _step("colocated-8b"),
        _TWO_GPUS,
        "The update runs at about half of the GPUs' peak FLOP/s (calculated), and an engine takes 7 ms for a token of "
        "its 64 responses.",
    ),
    Goal(
        "14B, one H200: full fine-tuning, bfloat16 moments", "trains", _TRAINS, ("large_models",), _trains("14b"), _H200
    ),
    Goal(
        "0.6B, one H200, 128 × 512 tokens: a step",
        "≤ 2.2 s",
        Bound(2.2),
        ("large_models",),
        _step("0.6b"),
        _H200,
        "vLLM needs about 3.6 ms for a token of 128 responses, which is 1.8 s of the aim; update and sync take 0.9 s.",
    ),
    Goal(
        "8B with adapters, 40 GiB of a GPU",
        "trains",
        _TRAINS,
        ("h100/adapters_and_8_bits",),
        _trains("8b-40gib"),
        _H100,
    ),
    Goal(
        "32B with adapters, one H200",
        "trains",
        _TRAINS,
        ("adapters_and_8_bits",),
        _trains("32b"),
        "[adapters](lora.md#memory)",
        "Not tried on a GPU.",
    ),
    Goal(
        "SmolLM2-135M with adapters: highest mean reward of five steps",
        "≥ 0.9",
        Bound(0.9, is_minimum=True),
        ("smollm2_lora",),
        _highest_reward,
        "[adapters](lora.md#reward)",
    ),
    Goal(
        "8B, `maxStaleness` 1 compared with 0: tokens per second",
        "≥ 1.3 ×",
        Bound(1.3, is_minimum=True),
        ("topologies",),
        _speed_up("overlapped-8b", "disaggregated-8b"),
        _TWO_GPUS,
    ),
    Goal(
        "0.6B, `maxStaleness` 1 compared with 0: tokens per second",
        "≥ 1.3 ×",
        Bound(1.3, is_minimum=True),
        ("topologies",),
        _speed_up("overlapped", "disaggregated"),
        _TWO_GPUS,
        "The rollout takes three quarters of a step, so 1.35 × is the limit. The rest was not examined.",
    ),
    Goal(
        "Live recovery of two policy ranks, without the retried phase",
        "≤ 5 s",
        Bound(5),
        ("ranks_recover",),
        _live_recoveries,
        _RECOVERY,
        "The retried optimizer step compiled for 16 s. The step of the failed sync saved its rollouts for 2 s; most of "
        "the rest was not examined. Compilation and saving have been changed since, and not measured again.",
    ),
    Goal(
        "Recovery from a killed engine",
        "≤ 25 s",
        Bound(25),
        ("ranks_recover",),
        _lost_engine,
        _RECOVERY,
        "The start of a process takes some 13 s, and the start of the engine in it 16 s.",
    ),
    Goal(
        "Diagnosis, newest set: right first",
        "≥ 95 %",
        Bound(95, is_minimum=True),
        (_NEWEST_SET,),
        _right_share,
        _ACCURACY,
        "Five misses; in two of them, the text does not show the cause.",
    ),
    Goal(
        "Diagnosis, newest set: failures without a diagnosis",
        "none",
        _NONE,
        (_NEWEST_SET,),
        _cases("silent"),
        _ACCURACY,
        "One shows only torch's failed assertion on a MIG slice, the other a full disk that is a memory file system.",
    ),
    Goal(
        "Diagnosis, newest set: wrong with a confidence above 0.8",
        "none",
        _NONE,
        (_NEWEST_SET,),
        _cases("wrong_and_sure"),
        _ACCURACY,
    ),
    Goal(
        "Three failures of TRL: right first, complete in attempt 2",
        "all",
        Bound(len(_CLASS_OF_FAILURE), is_minimum=True),
        ("trl_failures", "h100/trl_failures"),
        _recovered_failures,
        _ADAPTERS_OF_TRAINERS,
    ),
    Goal(
        "Three failures of verl: right first, complete in attempt 2",
        "all",
        Bound(len(_CLASS_OF_FAILURE), is_minimum=True),
        ("verl_failures",),
        _recovered_failures,
        _ADAPTERS_OF_TRAINERS,
        "verl has run on a GPU once, and not to the end.",
    ),
    Goal(
        "Cost of the probe",
        "< 0.1 % of a step",
        Bound(0.1),
        ("probe_overhead",),
        _probe,
        "[probe](#cost-of-the-probe-in-another-trainer)",
        "The noise is larger than the aim. On a CPU, no code of the probe runs in a step; on a GPU, it was not timed.",
    ),
    Goal(
        "Cost of the memory log",
        "≤ 0.5 %",
        Bound(0.5),
        ("memory_telemetry",),
        _memory_log,
        "[telemetry](telemetry.md#cost)",
    ),
    Goal(
        "Cost of all memory mitigations together",
        "≤ 2 % of a step",
        Bound(2),
        ("memory_mitigation_cost",),
        _mitigations,
        "[mitigations](mitigations.md#costs-and-savings)",
    ),
    Goal(
        "Operator, 1,000 jobs: peak memory",
        "≤ 117 MB",
        Bound(117),
        ("operator_scale",),
        _operator_memory,
        "[1,000 jobs](#a-thousand-jobs-at-once)",
    ),
    Goal(
        "60 minutes of random faults: complete jobs",
        "all",
        _NONE,
        ("soak",),
        _incomplete_jobs,
        "[60 minutes](#60-minutes-of-random-faults)",
    ),
    Goal(
        "30 minutes of random faults, every topology: complete jobs",
        "all",
        _NONE,
        ("soak_topologies",),
        _incomplete_jobs,
        "[30 minutes](#30-minutes-with-jobs-of-every-topology)",
    ),
)
"""All goals, in the order of the table."""
