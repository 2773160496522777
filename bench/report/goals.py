"""The block of goals: each with its aim, the recorded result, and the cause if it is missed.

`GOALS` is the only list of them. Results, and if they meet the aim, are read from `bench/results/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.report.goal_readings import (
    CLASS_OF_FAILURE,
    Reading,
    cases,
    first_step,
    highest_reward,
    incomplete_jobs,
    live_recoveries,
    lost_engine,
    memory_log,
    mitigations,
    of_arm,
    operator_memory,
    peak_gpu,
    probe,
    recovered_failures,
    right_share,
    speed_up,
    step,
    trains,
)
from bench.report.markdown import has_result, read, table
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
        of_arm("8b", step),
        _H200,
        "The rollout takes 9 ms for each of its 1,024 tokens. 8.5 s of the update are matrix products at about 740 "
        "TFLOP/s, and 1.7 s are transfers of the optimizer's state "
        "([profile](performance.md#profile-of-an-8b-update)).",
    ),
    Goal("8B, one H200: peak GPU memory", "≤ 90 GiB", Bound(90), ("large_models",), of_arm("8b", peak_gpu), _H200),
    Goal(
        "8B, one H200: start-up and first step, empty compile caches",
        "≤ 90 s",
        Bound(90),
        ("large_models",),
        of_arm("8b-cold", first_step),
        _H200,
        "The engine starts in 66 s. About half of that is torch.compile, according to the log of an earlier start. "
        "The first rollout takes 5 s longer than the next, probably because it compiles Triton kernels.",
    ),
    Goal(
        "8B, one H200: start-up and first step, warm compile caches",
        "≤ 90 s",
        Bound(90),
        ("large_models",),
        of_arm("8b-warm", first_step),
        _H200,
    ),
    Goal("8B, one GPU of 80 GB: a step", "≤ 30 s", Bound(30), ("h100/large_models",), of_arm("8b", step), _H100),
    Goal(
        "8B, two H200s, colocated: a step",
        "≤ 11 s",
        Bound(11),
        ("topologies",),
        of_arm("colocated-8b", step),
        _TWO_GPUS,
        "The update runs at about half of the GPUs' peak FLOP/s (calculated), and an engine takes 7 ms for a token of "
        "its 64 responses.",
    ),
    Goal(
        "14B, one H200: full fine-tuning, bfloat16 moments",
        "trains",
        _TRAINS,
        ("large_models",),
        of_arm("14b", trains),
        _H200,
    ),
    Goal(
        "0.6B, one H200, 128 × 512 tokens: a step",
        "≤ 2.2 s",
        Bound(2.2),
        ("large_models",),
        of_arm("0.6b", step),
        _H200,
        "vLLM needs about 3.6 ms for a token of 128 responses, which is 1.8 s of the aim; update and sync take 0.9 s.",
    ),
    Goal(
        "8B with adapters, 40 GiB of a GPU",
        "trains",
        _TRAINS,
        ("h100/adapters_and_8_bits",),
        of_arm("8b-40gib", trains),
        _H100,
    ),
    Goal(
        "32B with adapters, one H200",
        "trains",
        _TRAINS,
        ("adapters_and_8_bits",),
        of_arm("32b", trains),
        "[adapters](lora.md#memory)",
    ),
    Goal(
        "SmolLM2-135M with adapters: highest mean reward of five steps",
        "≥ 0.9",
        Bound(0.9, is_minimum=True),
        ("smollm2_lora",),
        highest_reward,
        "[adapters](lora.md#reward)",
    ),
    Goal(
        "8B, `maxStaleness` 1 compared with 0: tokens per second",
        "≥ 1.3 ×",
        Bound(1.3, is_minimum=True),
        ("topologies",),
        speed_up("overlapped-8b", "disaggregated-8b"),
        _TWO_GPUS,
    ),
    Goal(
        "0.6B, `maxStaleness` 1 compared with 0: tokens per second",
        "≥ 1.3 ×",
        Bound(1.3, is_minimum=True),
        ("topologies",),
        speed_up("overlapped", "disaggregated"),
        _TWO_GPUS,
        "The rollout takes three quarters of a step, so 1.35 × is the limit. The rest was not examined.",
    ),
    Goal(
        "Live recovery of two policy ranks, without the retried phase",
        "≤ 5 s",
        Bound(5),
        ("ranks_recover",),
        live_recoveries,
        _RECOVERY,
        "The failed sync was repeated 3.4 s later. The new group takes 0.5 s of these; the rest was not examined. The "
        "update before it took 1.6 s longer than in other steps, probably because a checkpoint was being written.",
    ),
    Goal(
        "Recovery from a killed engine",
        "≤ 25 s",
        Bound(25),
        ("ranks_recover",),
        lost_engine,
        _RECOVERY,
        "A process and its engine start anew: in the new attempt of the same run, these took 12 s and 18 s.",
    ),
    Goal(
        "Diagnosis, newest set: right first",
        "≥ 95 %",
        Bound(95, is_minimum=True),
        (_NEWEST_SET,),
        right_share,
        _ACCURACY,
        "Five misses; in two of them, the text does not show the cause.",
    ),
    Goal(
        "Diagnosis, newest set: failures without a diagnosis",
        "none",
        _NONE,
        (_NEWEST_SET,),
        cases("silent"),
        _ACCURACY,
        "One shows only torch's failed assertion on a MIG slice, the other a full disk that is a memory file system.",
    ),
    Goal(
        "Diagnosis, newest set: wrong with a confidence above 0.8",
        "none",
        _NONE,
        (_NEWEST_SET,),
        cases("wrong_and_sure"),
        _ACCURACY,
    ),
    Goal(
        "Three failures of TRL: right first, complete in attempt 2",
        "all",
        Bound(len(CLASS_OF_FAILURE), is_minimum=True),
        ("trl_failures", "h100/trl_failures"),
        recovered_failures,
        _ADAPTERS_OF_TRAINERS,
    ),
    Goal(
        "Three failures of verl: right first, complete in attempt 2",
        "all",
        Bound(len(CLASS_OF_FAILURE), is_minimum=True),
        ("verl_failures",),
        recovered_failures,
        _ADAPTERS_OF_TRAINERS,
    ),
    Goal(
        "Cost of the probe",
        "< 0.1 % of a step",
        Bound(0.1),
        ("probe_overhead_gpu",),
        probe,
        "[probe](#cost-of-the-probe-in-another-trainer)",
    ),
    Goal(
        "Cost of the memory log",
        "≤ 0.5 %",
        Bound(0.5),
        ("memory_telemetry",),
        of_arm("samples alone", memory_log),
        "[telemetry](telemetry.md#cost)",
    ),
    Goal(
        "Cost of all memory mitigations together",
        "≤ 2 % of a step",
        Bound(2),
        ("memory_mitigation_cost",),
        mitigations,
        "[mitigations](mitigations.md#costs-and-savings)",
    ),
    Goal(
        "Operator, 1,000 jobs: peak memory",
        "≤ 117 MB",
        Bound(117),
        ("operator_scale",),
        operator_memory,
        "[1,000 jobs](#a-thousand-jobs-at-once)",
    ),
    Goal(
        "60 minutes of random faults: complete jobs",
        "all",
        _NONE,
        ("soak",),
        incomplete_jobs,
        "[60 minutes](#60-minutes-of-random-faults)",
    ),
    Goal(
        "30 minutes of random faults, every topology: complete jobs",
        "all",
        _NONE,
        ("soak_topologies",),
        incomplete_jobs,
        "[30 minutes](#30-minutes-with-jobs-of-every-topology)",
    ),
)
"""All goals, in the order of the table."""
