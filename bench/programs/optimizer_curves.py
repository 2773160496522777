"""Curves of one job with each form of the optimizer's state: reward, loss and norm of the gradient by step.

    python -m bench.programs.optimizer_curves [WORKLOAD] [--device cpu|cuda] [--steps N] [--seeds N] [--arms ARM ...]
                                              [--plot]

Workloads:
    digits       examples/digits.yaml, whose model of 156,000 parameters learns its task on a CPU
    smollm2      examples/smollm2-chain-sum.yaml: SmolLM2-135M-Instruct, for which a GPU is advisable
    digits-0.6b  the task of digits.yaml with the layers of Qwen3-0.6B's shape and a small vocabulary, likewise

The arms have the same seeds, and float32 has one more:
    float32                         weights and AdamW's moments in float32
    float32, streamed               `memory.optimizerOffload: Enabled`
    <type> moments                  each other data type that `policy.optimizer.moments` offers
    bfloat16 weights                `model.dtype: bfloat16`, whose masters are float32
    bfloat16 weights and moments    both in bfloat16

Records `bench/results/optimizer_curves.json` (the other workloads: `optimizer_curves_smollm2.json` and
`optimizer_curves_qwen3.json`): a row for each arm, and one with the verdict. An arm is compared with float32 seed by
seed: the difference of the mean reward over the last quarter of the steps, and over all steps, which also depends on
how soon the model learns. The noise is the largest difference between two float32 runs whose seeds differ. Draws a
figure of the same name beside the result; `--plot` only draws what is recorded. `--arms` runs some arms; the rows of
the others stay as they are recorded, and must have the same steps and seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import yaml

from bench.harness.record import RESULTS, record, recorded
from bench.report.optimizer_curves import CURVES, REFERENCE, draw
from rljob_api.optimizer import OptimizerSpec
from rljob_testing.repository import EXAMPLES, ROOT

Spec = dict[str, Any]
Run = Mapping[str, Any]
"""A seed, and the values of each curve by step."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A job to run with each arm."""

    name: str
    """Of its results."""
    manifest: Path
    model: str
    """Described for readers."""
    changes: Spec = field(default_factory=dict)
    """Fields of the spec that differ from those in the manifest."""


WORKLOADS = {
    "digits": Workload("optimizer_curves", EXAMPLES / "digits.yaml", "a model of 156,000 parameters"),
    "smollm2": Workload("optimizer_curves_smollm2", EXAMPLES / "smollm2-chain-sum.yaml", "SmolLM2-135M-Instruct"),
    "digits-0.6b": Workload(
        "optimizer_curves_qwen3",
        EXAMPLES / "digits.yaml",
        "the layers of Qwen3-0.6B's shape",
        {
            "model": {
                "uri": "random://qwen3?hidden=1024&intermediate=3072&layers=28&heads=16&kvHeads=8&headDim=128&tied=false"
            },
            "algorithm": {"learningRate": 1.0e-4},
        },
    ),
}

_STREAMED: Spec = {"memory": {"optimizerOffload": "Enabled"}}
_BFLOAT16_WEIGHTS: Spec = {"model": {"dtype": "bfloat16"}}


def _moments(dtype: str) -> Spec:
    return {"policy": {"optimizer": {"moments": dtype}}}


OTHER_MOMENTS = [dtype for dtype in get_args(OptimizerSpec.model_fields["moments"].annotation) if dtype != "float32"]
ARMS: dict[str, Spec] = {
    REFERENCE: {},
    "float32, streamed": _STREAMED,
    **{f"{dtype} moments": _moments(dtype) for dtype in OTHER_MOMENTS},
    "bfloat16 weights": _BFLOAT16_WEIGHTS,
    "bfloat16 weights and moments": _BFLOAT16_WEIGHTS | _moments("bfloat16"),
}
"""Fields of the spec that an arm adds to the job."""


def main(workload: str, device: str, steps: int, seeds: int, arms: list[str], plot: bool, results: Path) -> None:
    job = WORKLOADS[workload]
    if not plot:
        note = f"{job.manifest.relative_to(ROOT)}, {steps} steps, {job.model}"
        kept = {arm: row for arm, row in recorded_rows(job.name, results).items() if arm not in arms}
        runs: dict[str, list[Run]] = {
            arm: [] if arm in arms else kept[arm]["runs"] for arm in ARMS if arm in arms or arm in kept
        }
        # Seed by seed, so that a change of the machine's load affects all arms alike.
        for seed in range(seeds + 1):
            for arm in arms if seed < seeds else {REFERENCE} & set(arms):
                runs[arm].append(run(manifest_of(job, arm, steps, seed), seed, device))
                print(f"{arm}, seed {seed}: {last_quarter(runs[arm][-1]):.3f}", flush=True)
                if seed > 0:  # enough for a verdict, so that a run that is stopped has a result
                    record(job.name, rows_of(runs, kept), note, results)
    picture = results / f"{job.name}.png"
    draw(json.loads((results / f"{job.name}.json").read_text()), picture)
    print(picture)


def recorded_rows(name: str, results: Path) -> dict[str, dict[str, Any]]:
    """The row of each arm that has been recorded, by its name."""
    return {row["arm"]: row for row in recorded(name, results) if row["arm"] in ARMS}


def manifest_of(workload: Workload, arm: str, steps: int, seed: int) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(workload.manifest.read_text())
    spec = manifest["spec"]
    for changes in (workload.changes, ARMS[arm]):
        for part, fields in copy.deepcopy(changes).items():
            spec[part] = spec.get(part, {}) | fields
    spec["algorithm"] |= {"steps": steps, "seed": seed}
    spec["checkpoint"] = {"everySteps": steps}
    return manifest


def run(manifest: dict[str, Any], seed: int, device: str) -> Run:
    """Run the job and read its curves. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        path, output = Path(directory) / "job.yaml", Path(directory) / "run"
        path.write_text(yaml.safe_dump(manifest))
        command = [sys.executable, "-m", "rljob_trainer", "run", str(path), "--output", str(output), "--device", device]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return {
        "seed": seed,
        "reward": [step["reward"]["mean"] for step in steps],
        "loss": [step["metrics"]["loss"] for step in steps],
        "grad_norm": [step["metrics"]["grad_norm"] for step in steps],
    }


def rows_of(
    runs: Mapping[str, Sequence[Run]], kept: Mapping[str, dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """A row for each arm, and the verdict. `runs`: by arm, with the first seeds of float32's in the same order. `kept`:
    rows that stay as they are, by arm."""
    rows = [
        (kept or {}).get(arm)
        or {
            "arm": arm,
            "settings": ARMS[arm],
            "identical_to": identical_to(arm, runs),
            "last_quarter": [last_quarter(each) for each in of_arm],
            "all_steps": [all_steps(each) for each in of_arm],
            "runs": [rounded(each) for each in of_arm],
        }
        for arm, of_arm in runs.items()
    ]
    return [*rows, {"arm": "verdict", **{key: verdict(rows, key) for key in ("last_quarter", "all_steps")}}]


def verdict(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Largest difference of each arm's mean reward from that of float32 with the same seed, compared with the noise of
    seeds."""
    rewards = {row["arm"]: row[key] for row in rows}
    reference = rewards.pop(REFERENCE)
    noise = max(abs(one - other) for one, other in combinations(reference, 2))
    differences = {
        arm: max((value - base for value, base in zip(values, reference, strict=False)), key=abs)
        for arm, values in rewards.items()
    }
    largest = max(differences.values(), key=abs, default=0.0)
    return {
        "noise": noise,
        "differences": differences,
        "largest_difference": largest,
        "is_within_noise": abs(largest) <= noise,
    }


def identical_to(arm: str, runs: Mapping[str, Sequence[Run]]) -> str | None:
    """The first earlier arm whose curves are equal to those of `arm` in every digit, for each of its seeds."""
    earlier = list(runs)[: list(runs).index(arm)]
    return next((other for other in earlier if list(runs[other][: len(runs[arm])]) == list(runs[arm])), None)


def last_quarter(each: Run) -> float:
    return statistics.fmean(each["reward"][-(len(each["reward"]) // 4) :])


def all_steps(each: Run) -> float:
    return statistics.fmean(each["reward"])


def rounded(each: Run) -> dict[str, Any]:
    """`each` with six significant digits, to keep the result small."""
    return dict(each) | {curve: [float(f"{value:.6g}") for value in each[curve]] for curve in CURVES}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", choices=WORKLOADS, default="digits", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each arm; float32 has one more")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms to run; default: all")
    parser.add_argument("--plot", action="store_true", help="draw what is recorded; runs nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON and the figure go")
    main(**vars(parser.parse_args()))
