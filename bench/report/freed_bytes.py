"""Expected and observed effects of changes of the memory plan, as a table and a figure.

    python -m bench.report.freed_bytes

Reads recovered_jobs.json and recovery_in_pods.json for the effects of recoveries, and memory_*.json for settings that
were changed without a failure. Writes bench/results/freed_bytes.png. Injected failures are left out: any change frees
the memory of the fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.harness.record import RESULTS
from bench.report.markdown import facts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import DiagnosisStatus
from rljob_api.recovery import RecoverySpec
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import Constraints, RecoveryState, profile_of
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.families.activation_checkpointing import ACTIVATION_CHECKPOINTING
from rljob_memory.recovery.families.micro_batch import LOGPROB_CHUNK, MICRO_BATCH
from rljob_memory.recovery.families.optimizer_offload import OPTIMIZER_OFFLOAD
from rljob_memory.recovery.families.rollout_sleep import ROLLOUT_SLEEP
from rljob_memory.recovery.families.weight_sync import WEIGHT_EXPORT
from rljob_memory.recovery.family import Family
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Hardware, ModelShape, Workload

PICTURE = RESULTS / "freed_bytes.png"
TOLERANCE = 1 / 3
"""A larger error, as a share of the observed bytes, is a defect of the expectation."""

How = Literal["recovery", "measurement"]
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one change."""

    setting: str
    expected_bytes: int
    observed_bytes: int
    how: How
    """Observed in a recovery, or with one setting changed and no failure."""

    @property
    def off_by(self) -> float:
        """Error of the expectation, as a share of the observed bytes."""
        return self.expected_bytes / self.observed_bytes - 1

    @property
    def is_close(self) -> bool:
        return abs(self.off_by) <= TOLERANCE


def effects(results: Path = RESULTS) -> list[Effect]:
    """All recorded effects."""
    recoveries = [*_of_jobs(_read(results, "recovered_jobs")), *_of_pods(_read(results, "recovery_in_pods"))]
    settings = _read(results, "memory_mitigation_cost"), _read(results, "memory_rollout_role")
    return [*recoveries, *_of_settings(*settings)]


def _read(results: Path, name: str) -> Result:
    return dict(json.loads((results / f"{name}.json").read_text()))


# --- effects of recoveries ---


def _of_jobs(result: Result) -> Iterator[Effect]:
    for row in result["rows"]:
        if not row.get("injected"):
            for remedy in row.get("remedies", ()):
                yield from _seen(remedy["setting"], remedy["expected_bytes"], remedy["observed_bytes"])


def _of_pods(result: Result) -> Iterator[Effect]:
    for row in result["rows"]:
        for change in row["plan_changes"]:
            remedy = change["remedy"]
            yield from _seen(remedy["setting"], remedy.get("expectedBytes"), remedy.get("observedBytes"))


def _seen(setting: str, expected_bytes: int | None, observed_bytes: int | None) -> Iterator[Effect]:
    """Yields nothing if a number is unknown, or if memory did not shrink."""
    if expected_bytes and observed_bytes and observed_bytes > 0:
        yield Effect(setting, expected_bytes, observed_bytes, "recovery")


# --- effects of single settings ---

_QWEN3_0_6B = ModelShape(
    596_049_920, layers=28, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
_STEP = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1008)
_PROFILE = profile_of(Hardware("cuda", 140 * GIB, 128 * GIB, "2.11.0"), _QWEN3_0_6B, _STEP, fused=True)
_PLAN = MemoryPlan(
    empty_cache=True,
    expandable_segments=True,
    rollout_sleep="Level2",
    kv_cache_bytes=8 * GIB,
    micro_batch_tokens=16_384,
    logprob_chunk_tokens=384,
    activation_checkpointing=False,
    optimizer_offload=False,
    sync_bucket_bytes=297 * MIB,
)
"""The workload and plan of bench/harness/memory_roles.py."""


def _of_settings(costs: Result, engine: Result) -> Iterator[Effect]:
    """Policy settings: the difference in peak or lasting reserved memory. Engine sleep: the memory that it frees."""
    arms = {row["arm"]: row for row in costs["rows"]}
    peak = arms["default plan, again"]["peak_reserved_bytes"]
    for family, arm in (
        (MICRO_BATCH, "microBatchTokens: half"),
        (LOGPROB_CHUNK, "logprobChunkTokens: a quarter"),
        (OPTIMIZER_OFFLOAD, "optimizerOffload: Enabled"),
        (ACTIVATION_CHECKPOINTING, "activationCheckpointing: Enabled"),
    ):
        yield _measured(family, peak - arms[arm]["peak_reserved_bytes"])
    with_buffer, without = (
        arms[name]["reserved_after_sync_bytes"] for name in ("weightExport: ReservedBuffer", "default plan")
    )
    yield _measured(WEIGHT_EXPORT, with_buffer - without, weight_export="ReservedBuffer")
    alone = next(row for row in engine["rows"] if row["arm"] == "engine alone")
    yield _measured(ROLLOUT_SLEEP, alone["awake_bytes"] - alone["asleep_bytes"], rollout_sleep="Disabled")


def _measured(family: Family, observed_bytes: int, **before: Any) -> Effect:
    """Compare with the expectation of `family` for its next change of the plan, after the changes `before`."""
    change = family.next_change(_spike_under(_PLAN.model_copy(update=before)))
    if change is None or change.expected_bytes is None:
        raise ValueError(f"expected {family.name} to say what its next change frees, found {change}")
    return Effect(family.name, change.expected_bytes, observed_bytes, "measurement")


def _spike_under(plan: MemoryPlan) -> Case:
    """A failed request for the logits of one chunk."""
    requested = 4 * _QWEN3_0_6B.vocabulary * plan.logprob_chunk_tokens
    spike = FailureClass.ACTIVATION_SPIKE
    return Case(
        spike,
        DiagnosisStatus(class_name=spike, confidence=1.0, message="", numbers={"requested_bytes": requested}),
        "policy",
        "update",
        RecoveryState(plan, steps=1),
        Constraints(MemorySettings(), RecoverySpec(), _PROFILE, frozenset({"RespawnRole"})),
        dead=frozenset(),
    )


# --- table and figure ---


def block(_result: Mapping[str, Any]) -> str:
    """The table, from all results that the module reads."""
    found = effects()
    recoveries = sum(effect.how == "recovery" for effect in found)
    close = sum(effect.is_close for effect in found)
    counts = [
        ("changes", str(len(found))),
        ("observed in a recovery", str(recoveries)),
        ("one setting changed, nothing failed", str(len(found) - recoveries)),
        ("expected within a third of what was observed", f"{close} of {len(found)}"),
    ]
    return f"{facts(counts)}\n{table(found)}\n"


def table(found: list[Effect]) -> str:
    """Markdown with one line for each effect."""
    where = {"recovery": "in a recovery", "measurement": "by itself"}
    lines = ["| setting | changed | expected to free | freed | error |", "|---|---|---|---|---|"]
    for effect in found:
        sizes = (f"{size / GIB:.2f} GiB" for size in (effect.expected_bytes, effect.observed_bytes))
        lines.append(
            f"| `{effect.setting}` | {where[effect.how]} | {' | '.join(sizes)} | {100 * effect.off_by:+.0f} % |"
        )
    return "\n".join(lines)


def draw(found: list[Effect], path: Path) -> None:
    """Write the figure as PNG."""
    from matplotlib import style

    from rljob_trainer.plot.style import INK, MUTED, PHASE_COLOURS, STYLE, titled_figure

    colours = {"recovery": PHASE_COLOURS["update"], "measurement": PHASE_COLOURS["rollout"]}
    names = {"recovery": "in a recovery", "measurement": "one setting changed, nothing failed"}
    sizes = [size / GIB for effect in found for size in (effect.expected_bytes, effect.observed_bytes)]
    ends = (min(sizes) / 10, max(sizes) * 10)
    close = sum(effect.is_close for effect in found)
    with style.context([STYLE, {"figure.figsize": (8.0, 6.4), "axes.grid.axis": "both"}]):
        figure, [axes] = titled_figure(
            "Memory freed by a change of the memory plan",
            f"expected and observed on one H200; {close} of {len(found)} within a third (shaded) of the observed bytes",
        )
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="observed, GiB", ylabel="expected, GiB")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.plot(ends, ends, color=MUTED, linewidth=1)
        lower, upper = ([end * factor for end in ends] for factor in (1 - TOLERANCE, 1 + TOLERANCE))
        axes.fill_between(ends, lower, upper, color=MUTED, alpha=0.13, linewidth=0)
        for how, colour in colours.items():
            of_kind = [effect for effect in found if effect.how == how]
            axes.scatter(
                [effect.observed_bytes / GIB for effect in of_kind],
                [effect.expected_bytes / GIB for effect in of_kind],
                color=colour,
                label=names[how],
                zorder=3,
            )
        for effect in found:
            above = effect.off_by >= 0
            axes.annotate(
                effect.setting,
                (effect.observed_bytes / GIB, effect.expected_bytes / GIB),
                xytext=(-9 if above else 9, 0),
                textcoords="offset points",
                ha="right" if above else "left",
                va="center",
                color=INK,
                fontsize=9.5,
            )
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(path)


if __name__ == "__main__":
    recorded = effects()
    draw(recorded, PICTURE)
    print(table(recorded))
    print(PICTURE)
