"""Predictions compared with measurements, by phase, and the statistics of their errors. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import Budget, Owner, Phase, Setup, budget, setup_of_facts
from rljob_memory.budget.gpu import evenly_filled, float32_head_bytes
from rljob_memory.budget.lines import Line

Row = dict[str, Any]
"""A row of a result."""

TIMED_OUT = 124
"""Exit code of `timeout`."""

PHASES: tuple[Phase, ...] = ("rollout", "update", "sync")

MEMORY = ("gpu", "host")
"""Values whose errors are the accuracy of the memory; those of torch are parts of `gpu`."""

TOLERATED_UNDERESTIMATE = 0.02


def _predicted(setup: Setup, predicted: Budget, phase: Phase) -> Iterator[tuple[str, float]]:
    work = setup.work
    yield "gpu", predicted.peak("gpu", phase)
    yield "seconds", predicted.seconds(phase)
    owner: Owner = "engine" if phase == "rollout" else "policy"
    processes = work.engine_processes_per_pod if owner == "engine" else work.ranks_per_pod
    parts: list[Phase] = ["update", "optimizer"] if phase == "update" else [phase]
    yield owner, max(predicted.in_torch(owner, part) for part in parts)
    lines = predicted.of("host", owner=owner).uses("host", phase)
    yield "host", sum(line.bytes for line in lines if "checkpoint" not in line.use) // processes


def with_gradient_of_the_head(setup: Setup, predicted: Budget) -> Budget:
    """The budget of rows that were recorded while a single rank formed the head's gradient before it was added."""
    work, model = setup.work, setup.model
    if work.policy_ranks > 1 or model.adapter_parameters:
        return predicted
    size = float32_head_bytes(model) + model.largest_parameter_bytes
    line = Line("policy", "gradient of the head", "gpu", size, frozenset({"update"}), "not summed")
    return replace(predicted, lines=(*predicted.lines, line))


def with_repeated_prompts(setup: Setup, plan: MemoryPlan, predicted: Budget) -> Budget:
    """The budget of rows that were recorded while each response repeated its prompt in an update."""
    prompts = setup.work.prompts_per_step * setup.work.group_size
    alone = setup.with_work(group_size=1, prompts_per_step=prompts)
    update = budget(alone, evenly_filled(alone.work, plan)).seconds("update")
    return replace(predicted, seconds_by_phase={**predicted.seconds_by_phase, "update": update})


def compared(
    setup: Setup,
    plan: MemoryPlan,
    measured: Mapping[Phase, Mapping[str, float]],
    step_seconds: float,
    *,
    matrices_summed: bool = True,
    prompts_shared: bool = True,
) -> Row:
    """Predicted and measured values of a step, and their ratios, as the last columns of a row. All responses have the
    maximum length, and no checkpoint is written. Values that were not measured are left out."""
    predicted = budget(setup, evenly_filled(setup.work, plan))
    if not matrices_summed:
        predicted = with_gradient_of_the_head(setup, predicted)
    if not prompts_shared:
        predicted = with_repeated_prompts(setup, plan, predicted)
    return {
        "missing_bytes": setup.missing_bytes(predicted),
        "matrices_summed": matrices_summed,
        "prompts_shared": prompts_shared,
        "own_all_reduce": True,
        "step_seconds": _pair(predicted.seconds(), step_seconds),
        "phases": {
            phase: {
                name: _pair(value, measured[phase][name])
                for name, value in _predicted(setup, predicted, phase)
                if measured.get(phase, {}).get(name)
            }
            for phase in PHASES
        },
    }


def compared_again(row: Row) -> Row:
    """The row with the predictions of today; unchanged if it has none, or if its facts are of another version.

    The GPU memory and seconds of its sync keep their prediction: until 2026-11-28, syncs copied weights more often. So
    do the seconds of a rollout of which the row does not say that engines over several GPUs used vLLM's all-reduce, not
    NCCL.
    """
    setup = setup_of_facts(row["facts"]) if "phases" in row else None
    if setup is None:
        return row
    measured = {
        phase: {name: pair["measured"] for name, pair in values.items()} for phase, values in row["phases"].items()
    }
    plan = MemoryPlan.model_validate(row["plan"])
    then = {name: row.get(name, False) for name in ("matrices_summed", "prompts_shared")}
    again = compared(setup, plan, measured, row["step_seconds"]["measured"], **then)
    sync = row["phases"]["sync"] | {"host": again["phases"]["sync"]["host"]}
    again["phases"]["sync"] = sync
    if setup.work.tensor_parallel_size > 1 and "own_all_reduce" not in row:
        rollout = again["phases"]["rollout"]
        more = row["phases"]["rollout"]["seconds"]["predicted"] - rollout["seconds"]["predicted"]
        rollout["seconds"] = row["phases"]["rollout"]["seconds"]
        again["step_seconds"] = _pair(again["step_seconds"]["predicted"] + more, row["step_seconds"]["measured"])
    return row | again


def _pair(predicted: float, measured: float) -> Row:
    """`ratio` above 1: predicted too much."""
    return {"predicted": predicted, "measured": measured, "ratio": round(predicted / measured, 4)}


# --- statistics ---


def statistics_of(rows: Sequence[Row]) -> dict[str, Row]:
    """Statistics of the errors by set of rows (`all`, `drawn`, `in_sample`) and value, and counts of wrong answers.

    A plan that changed during the job predicts nothing of it: such a row counts as a plan that ran out.
    """
    sets = {
        "all": rows,
        "drawn": [row for row in rows if row.get("drawn")],
        "in_sample": [row for row in rows if row.get("in_sample")],
    }
    return {name: _of_set(chosen) for name, chosen in sets.items() if chosen}


def _of_set(rows: Sequence[Row]) -> Row:
    ran = [row for row in rows if has_held(row)]
    fitting = [row for row in rows if not row.get("missing_bytes") and row.get("plan_changes") is not None]
    pairs = list(ratios(ran))
    memory = [ratio for name, ratio in pairs if name.partition(",")[0] in MEMORY]
    names = sorted({name for name, _ in pairs})
    return {
        "configurations": len(rows),
        "held": len(ran),
        "failed": sorted(row["arm"] for row in rows if row["exit_code"] not in (0, TIMED_OUT)),
        "first_plans_that_ran_out": sorted(row["arm"] for row in fitting if row["plan_changes"]),
        "refused_and_ran": sorted(row["arm"] for row in ran if row["missing_bytes"]),
        "memory": errors(memory),
        **{kind: errors([ratio for name, ratio in pairs if name.partition(",")[0] == kind]) for kind in MEMORY},
        "step_seconds": errors([row["step_seconds"]["ratio"] for row in ran]),
        **{name: errors([ratio for other, ratio in pairs if other == name]) for name in names},
    }


def has_held(row: Row) -> bool:
    """The job committed its steps with its first plan, so that the row has values to compare."""
    return "phases" in row and row.get("plan_changes") == 0


def ratios(rows: Iterable[Row]) -> Iterator[tuple[str, float]]:
    """Name and phase of each value, and its predicted divided by its measured value."""
    for row in rows:
        for phase, values in row["phases"].items():
            for name, pair in values.items():
                yield f"{name}, {phase}", pair["ratio"]


def errors(found: Sequence[float]) -> Row:
    """Statistics of ratios: shares of the measured values. `underestimates`: the share of ratios that are more than 2 %
    too small."""
    sizes = sorted(abs(ratio - 1) for ratio in found)
    if not sizes:
        return {"count": 0}
    last = min(-(-95 * len(sizes) // 100), len(sizes)) - 1
    return {
        "count": len(sizes),
        "median": round(statistics.median(sizes), 4),
        "percentile_95": round(sizes[last], 4),
        "least_ratio": min(found),
        "greatest_ratio": max(found),
        "underestimates": round(sum(ratio < 1 - TOLERATED_UNDERESTIMATE for ratio in found) / len(found), 4),
    }


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The statistics for people, a line for each set and value."""
    for name, found in statistics_of(rows).items():
        yield (
            f"{name}: {found['held']} of {found['configurations']} configurations held; "
            f"first plans that ran out: {_listed(found['first_plans_that_ran_out'])}; "
            f"refused although they run: {_listed(found['refused_and_ran'])}; failed: {_listed(found['failed'])}"
        )
        for value, error in found.items():
            if isinstance(error, dict) and error["count"]:
                yield (
                    f"  {value:<18}{error['count']:>4} values, median error {error['median']:.1%}, "
                    f"95th percentile {error['percentile_95']:.1%}, "
                    f"ratios {error['least_ratio']:.2f} to {error['greatest_ratio']:.2f}, "
                    f"more than 2 % too small {error['underestimates']:.1%}"
                )


def _listed(arms: Sequence[str]) -> str:
    return ", ".join(arms) or "none"
