"""Readings of recorded results for the goals: a value, and its text in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.report.markdown import GIB, Result, Row, gib
from bench.report.training import means_of_five

_NO_FAILURE = ("all steps are committed", "stopped by a time limit")
"""Messages of runs that did not fail by themselves. The second is of a run that `series` killed at its limit, and whose
row was made from its ledger afterwards."""


@dataclass(frozen=True)
class Reading:
    """A recorded value, in the unit of the goal's bound."""

    value: float
    """The value, or the least that it can be."""
    text: str
    """The value in the table, with its unit."""
    highest: float | None = None
    """The most that the value can be, if the record does not determine it; None: it does."""


def _arm(result: Result, name: str) -> Row | None:
    return next((row for row in result["rows"] if row["arm"] == name), None)


def of_arm(arm: str, reading: Callable[[Row], Reading | None]) -> Callable[[Result], Reading | None]:
    """Reads the row of an arm; None without such a row."""

    def of_result(result: Result) -> Reading | None:
        row = _arm(result, arm)
        return None if row is None else reading(row)

    return of_result


def step(row: Row) -> Reading | None:
    """Seconds per step."""
    if "seconds_per_step" not in row:
        return None
    return Reading(row["seconds_per_step"], f"{row['seconds_per_step']:.1f} s")


def trains(row: Row) -> Reading:
    """1 if steps after the warm-up were committed and no failure ended the run, otherwise 0."""
    has_trained = row["message"] in _NO_FAILURE and "seconds_per_step" in row
    return Reading(1, f"{row['seconds_per_step']:.1f} s per step") if has_trained else Reading(0, "failed")


def peak_gpu(row: Row) -> Reading:
    """Peak memory of the whole GPU, in GiB."""
    return Reading(row["device_peak_bytes"] / GIB, gib(row["device_peak_bytes"]))


def first_step(row: Row) -> Reading:
    """Seconds of the start-up and the first step."""
    start, first = row["start_up_seconds"], row["all_seconds"][0]
    return Reading(start + first, f"{start + first:.0f} s ({start:.0f} + {first:.0f})")


def speed_up(arm: str, reference: str) -> Callable[[Result], Reading | None]:
    """Tokens per second of an arm, as a multiple of another's."""

    def reading(result: Result) -> Reading | None:
        rows = [_arm(result, name) for name in (arm, reference)]
        if any(row is None or "tokens_per_second" not in row for row in rows):
            return None
        ours, theirs = (row["tokens_per_second"] for row in rows if row is not None)
        return Reading(ours / theirs, f"{ours / theirs:.2f} ×")

    return reading


def highest_reward(result: Result) -> Reading:
    """The highest mean reward of five successive steps."""
    [row] = result["rows"]
    highest = max(means_of_five(row["rewards"]))
    return Reading(highest, f"{highest:.2f}; {row['last_reward']:.2f} in the last five of {row['steps']} steps")


def live_recoveries(result: Result) -> Reading | None:
    """The longest live recovery in seconds. The record includes the retried phase, which takes between nothing and the
    median of that phase without a failure."""
    rows = [row for row in result["rows"] if row["arm"] == "live" and "failed" not in row]
    if not rows:
        return None
    text = ", ".join(f"{row['seconds_lost']:.1f} s ({row['failure']})" for row in rows)
    return Reading(
        max(row["seconds_lost"] - row["calm_phase_seconds"] for row in rows),
        f"{text}, each with the retried phase",
        max(row["seconds_lost"] for row in rows),
    )


def lost_engine(result: Result) -> Reading | None:
    lost = [row["seconds_lost"] for row in result["rows"] if row.get("failure") == "engine killed"]
    return Reading(lost[0], f"{lost[0]:.1f} s") if lost else None


def _of_all_cases(result: Result) -> Row:
    rows: dict[str, Row] = {row["class"]: row for row in result["rows"]}
    return rows["all"]


def right_share(result: Result) -> Reading:
    row = _of_all_cases(result)
    right, cases = row["right"], row["cases"]
    return Reading(100 * right / cases, f"{right} of {cases} ({100 * right / cases:.0f} %)")


def cases(count: str) -> Callable[[Result], Reading]:
    """A count of all cases."""
    return lambda result: Reading(_of_all_cases(result)[count], str(_of_all_cases(result)[count]))


CLASS_OF_FAILURE = {"update": "ActivationSpike", "awake": "EngineNotAsleep", "engine-too-large": "KVCacheOversized"}
"""Failures of `trl_failures` and `verl_failures`, and their class."""


def recovered_failures(*results: Result) -> Reading:
    """Failures that each of their measurements diagnosed correctly and completed in the second attempt."""
    rows = [row for result in results for row in result["rows"]]
    recovered = [
        all(_is_recovered(row) for row in rows if row["failure"] == failure)
        for failure in CLASS_OF_FAILURE
        if any(row["failure"] == failure for row in rows)
    ]
    return Reading(sum(recovered), f"{sum(recovered)} of {len(CLASS_OF_FAILURE)}")


def _is_recovered(row: Row) -> bool:
    first, *later = row["attempts"]
    is_right = first.get("class") == CLASS_OF_FAILURE[row["failure"]]
    return is_right and len(later) == 1 and later[0]["exit_code"] == 0


def _cost(percent: float, text: str) -> Reading:
    """A share of a step. A negative cost is noise, and the cost can be as large as the noise."""
    return Reading(percent, f"{text} (noise)", -percent) if percent < 0 else Reading(percent, text)


def probe(result: Result) -> Reading:
    """The largest share of a step on a GPU."""
    [row] = result["rows"]
    return Reading(row["step_percent"], f"{row['step_percent']:.3f} % of a step on a GPU (calculated)")


def memory_log(row: Row) -> Reading | None:
    if "error" in row:
        return None
    return Reading(row["share_percent"], f"{row['share_percent']:.2f} % of an update")


def mitigations(result: Result) -> Reading:
    rows = {row["arm"]: row for row in result["rows"]}
    default, none = (rows[arm]["without_generation_seconds"] for arm in ("default plan, again", "none of them"))
    percent = 100 * (default - none) / (rows["generation"]["generate_seconds"] + default)
    return _cost(percent, f"{percent:+.1f} % of a step")


def operator_memory(result: Result) -> Reading:
    [row] = result["rows"]
    megabytes = row["peak_bytes"]["operator"] / 1e6
    return Reading(megabytes, f"{megabytes:.0f} MB")


def incomplete_jobs(result: Result) -> Reading:
    [row] = result["rows"]
    return Reading(row["jobs"] - row["complete"], f"{row['complete']} of {row['jobs']}")
