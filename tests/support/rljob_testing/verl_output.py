"""Measurements of verl's steps, from the lines of metrics that it prints. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from itertools import pairwise

from rljob_testing.plan_accuracy.errors import Row

STEP_MARK = " step:"
"""Begins verl's line of metrics, behind Ray's prefix. The names of metrics, as in timing_s/step:1, have no space."""
PHASES = {"rollout": "gen", "log_probs": "old_log_prob", "update": "update_actor", "sync": "update_weights"}
"""Phases of a row, and the names that verl's trainer gives them."""
_METRIC = re.compile(r"(\S+):(?:np\.\w+\()?(-?(?:\d[.\d]*(?:e[-+]?\d+)?|inf|nan))\)?$")
"""A name and a number, which numpy 2 may print with its type: `np.float64(2.0)`."""


def metrics_of(line: str) -> dict[str, float]:
    """The metrics of a step, if the line has them: `… step:1 - name:value - name:value`."""
    _, mark, rest = line.partition(STEP_MARK)
    found = (_METRIC.match(part) for part in rest.rstrip().split(" - ")[1:] if mark)
    return {match[1]: float(match[2]) for match in found if match}


def measured(lines: Sequence[tuple[float, str]], begun: float, responses: int, warm_up_steps: int = 2) -> Row:
    """Seconds of all steps, and medians of those after the warm-up. `lines` and `begun` with seconds since the epoch,
    `responses` of a step. verl's own seconds do not count the metrics that it computes between two steps."""
    found = ((when, metrics_of(line)) for when, line in lines)
    steps = [(when, metrics) for when, metrics in found if "timing_s/step" in metrics]
    row: Row = {"all_seconds": [metrics["timing_s/step"] for _, metrics in steps]}
    if steps:
        row["start_up_seconds"] = steps[0][0] - row["all_seconds"][0] - begun
    counted = [metrics for _, metrics in steps[warm_up_steps:]]
    if not counted:
        return row
    whens = [when for when, _ in steps[warm_up_steps - 1 :]]

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, 0.0) for metrics in counted)

    return row | {
        "seconds_per_step": median("timing_s/step"),
        "seconds_with_metrics": statistics.median(after - before for before, after in pairwise(whens)),
        "seconds_by_phase": {phase: median(f"timing_s/{name}") for phase, name in PHASES.items()},
        "tokens_per_second": statistics.median(
            responses * metrics["response_length/mean"] / metrics["timing_s/step"] for metrics in counted
        ),
        "response_tokens": {name: median(f"response_length/{name}") for name in ("mean", "min", "max")},
        "torch_peak_reserved_bytes": round(median("actor/perf/max_memory_reserved_gb") * 2**30),
    }
