"""The budget compared with every recorded run of a Qwen3 shape: memory by allocator and by GPU, and seconds.

All responses of these runs have the maximum length. Of seconds, only those of large models are compared: with 0.6B the
host's cores decide, which differ between the recorded machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import Budget, Setup, budget
from rljob_memory.budget.gpu import evenly_filled
from rljob_memory.hardware import GPU_TYPES, Hardware
from rljob_memory.model_shape import shape_in_uri
from rljob_memory.sizes import GIB
from rljob_memory.workload import workload_of
from rljob_testing.plan_accuracy.errors import with_gradient_of_the_head
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_testing.repository import ROOT

RESULTS = ROOT / "bench" / "results"
BFLOAT16, INT8 = ({"policy": {"optimizer": {"moments": form}}} for form in ("bfloat16", "int8"))
LORA, FP8 = {"policy": {"lora": {"rank": 16}}}, {"rollout": {"quantization": "Fp8PerTensor"}}
_SUMMED = "2026-11-28"
"""Since then, a single rank has no gradient of the head beside its sum."""

TWO = {"policy": {"gpusPerReplica": 2}}
APART = {"topology": "Disaggregated", "policy": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1}}


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """The job of a recorded row."""

    model: str
    spec: dict[str, Any] = field(default_factory=dict)
    prompts: int = 16
    tokens: int = 1024


TP2 = TWO | {"rollout": {"tensorParallelSize": 2}}
ARMS = {
    "large_models": {
        "0.6b": RecordedJob("0.6b", tokens=512),
        "4b": RecordedJob("4b"),
        **{arm: RecordedJob("8b") for arm in ("8b", "8b-warm", "8b-earlier")},
        "8b-fp8": RecordedJob("8b", FP8),
        "14b": RecordedJob("14b", BFLOAT16),
    },
    "moments": {
        "8b": RecordedJob("8b"),
        "8b-bfloat16": RecordedJob("8b", BFLOAT16),
        "8b-int8": RecordedJob("8b", INT8),
    },
    "adapters_and_8_bits": {
        "8b": RecordedJob("8b", LORA),
        "8b-fp8": RecordedJob("8b", LORA | FP8),
        "8b-fp8-kv": RecordedJob("8b", LORA | {"rollout": FP8["rollout"] | {"kvCacheDtype": "Fp8"}}),
        "32b": RecordedJob("32b", LORA),
    },
    "tensor_parallel": {
        "tp2-8b": RecordedJob("8b", TP2),
        "tp2-14b": RecordedJob("14b", TP2 | {"policy": TWO["policy"] | BFLOAT16["policy"]}),
    },
    "topologies": {
        "colocated": RecordedJob("0.6b", TWO, prompts=32),
        "disaggregated": RecordedJob("0.6b", APART, prompts=32),
        "colocated-8b": RecordedJob("8b", TWO),
        "disaggregated-8b": RecordedJob("8b", APART),
    },
}
"""By result, and by the arm of a row."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run, and the budget of its plan."""

    name: str
    model: str
    row: dict[str, Any]
    setup: Setup
    budget: Budget

    def measured(self, actor: str, size: str) -> int | None:
        found = self.row.get("memory", {}).get(actor, {}).get(size)
        return None if found is None else int(found)


def recorded() -> Iterator[RecordedRun]:
    for folder, gpu in ((RESULTS, "h200"), (RESULTS / "h100", "h100")):
        for name, arms in ARMS.items():
            path = folder / f"{name}.json"
            result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
            for row in result["rows"]:
                if row["arm"] in arms:
                    before = result["date"] < _SUMMED
                    yield recorded_run(f"{gpu} {name} {row['arm']}", arms[row["arm"]], row, gpu, before)


def recorded_run(name: str, arm: RecordedJob, row: dict[str, Any], gpu: str, before_sums: bool) -> RecordedRun:
    algorithm = {"steps": 2, "promptsPerStep": arm.prompts, "maxPromptTokens": 16, "maxResponseTokens": arm.tokens}
    model = {"uri": f"random://qwen3?{SHAPES[arm.model]}"}
    given = {"model": model, "task": {"name": "digits"}, "algorithm": algorithm}
    spec = RLJobSpec.model_validate(given | arm.spec, by_alias=True, by_name=False)
    shape = shape_in_uri(spec, bytes_per_parameter=2)
    assert shape is not None
    hardware = Hardware("cuda", GPU_TYPES[gpu].memory_bytes, 512 * GIB, gpu=gpu, layers_compiled=True)
    setup = Setup(workload_of(spec), shape, hardware)
    plan = MemoryPlan.model_validate({key: value for key, value in row["plan"].items() if value is not None})
    predicted = budget(setup, evenly_filled(setup.work, plan))
    if before_sums:
        predicted = with_gradient_of_the_head(setup, predicted)
    return RecordedRun(name, arm.model, row, setup, predicted)


RUNS = list(recorded())


def pairs(of: str) -> list[Any]:
    """Predicted and recorded values of one kind, as parameters of a test."""
    found: list[Any] = []
    for run in RUNS:
        torch = run.row.get("torch_peak_reserved_bytes") or run.measured("policy-0", "peak_reserved_bytes")
        values: dict[str, tuple[float, float | None]] = {
            "policy": (run.budget.in_torch("policy", "update"), torch),
            "engine": (run.budget.in_torch("engine", "rollout"), run.measured("rollout-0", "peak_reserved_bytes")),
            "gpu": (run.budget.peak("gpu"), run.row.get("device_peak_bytes")),
            "update": (run.budget.peak("gpu", "update"), run.measured("policy-0", "gpu_used_bytes")),
        }
        values |= {
            f"{phase} seconds": (run.budget.seconds(phase), run.row.get("seconds_by_phase", {}).get(phase))
            for phase in ("rollout", "update")
            if run.model != "0.6b"
        }
        predicted, measured = values.get(of, (0, None))
        if measured:
            found.append(pytest.param(predicted, measured, id=run.name))
    return found


def test_enough_runs_are_recorded() -> None:
    assert len(RUNS) >= 22
    assert {run.model for run in RUNS} == {"0.6b", "4b", "8b", "14b", "32b"}


@pytest.mark.parametrize(("predicted", "measured"), pairs("policy"))
def test_the_peak_of_the_policys_torch_is_within_2_percent(predicted: int, measured: int) -> None:
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("predicted", "measured"), pairs("engine"))
def test_the_peak_of_the_engines_torch_is_within_5_percent(predicted: int, measured: int) -> None:
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("predicted", "measured"), [*pairs("gpu"), *pairs("update")])
def test_the_memory_in_use_on_a_gpu_is_within_5_percent(predicted: int, measured: int) -> None:
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("predicted", "measured"), pairs("rollout seconds") + pairs("update seconds"))
def test_seconds_of_large_models_are_within_20_percent(predicted: float, measured: float) -> None:
    assert predicted == pytest.approx(measured, rel=0.2)
