"""Large models: the peak memory of each phase, and the figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.harness.device_memory import DevicePeak
from bench.harness.shapes import SHAPES
from bench.programs.large_models import ARMS, WARM_UP_STEPS, manifest_of, memory_by_phase, variables_of
from bench.report.large_models_plot import MODELS, draw
from rljob_api.job import RLJobSpec

STEP = {
    "kind": "step",
    "attempt": 1,
    "reward": {"mean": 0.5, "std": 0.1, "min": 0.0, "max": 1.0},
    "response": {"mean_tokens": 8.0, "max_tokens": 8, "clipped_ratio": 1.0},
    "seconds": {"update": 1.0},
    "total_seconds": 1.0,
    "tokens": 80,
    "weights_version": 1,
}


def sample(step: int, phase: str, began: float, time: float, peak_reserved_bytes: int) -> dict[str, Any]:
    sizes = {"allocated_bytes": 1, "reserved_bytes": 1, "device_total_bytes": 1000}
    return {
        "step": step,
        "phase": phase,
        "began": began,
        "time": time,
        "peak_reserved_bytes": peak_reserved_bytes,
    } | sizes


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def device_with(*samples: tuple[float, int]) -> DevicePeak:
    device = DevicePeak()
    device.samples = list(samples)
    return device


def test_a_device_has_no_peak_outside_of_its_samples() -> None:
    device = device_with((1.0, 10), (2.0, 30), (3.0, 20))
    assert device.peak_bytes == 30
    assert device.peak_within([(0.5, 1.5), (2.5, 3.5)]) == 20
    assert device.peak_within([(4.0, 5.0)]) == device_with().peak_bytes == 0


def test_memory_by_phase_counts_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    write_lines(tmp_path / "ledger.jsonl", [STEP | {"step": step} for step in range(1, WARM_UP_STEPS + 3)])
    first = WARM_UP_STEPS + 1
    policy = [sample(1, "update", 0, 1, 900), sample(first, "update", 10, 11, 500), sample(first, "sync", 11, 12, 100)]
    write_lines(tmp_path / "memory" / "policy-0.jsonl", [*policy, sample(first + 1, "update", 20, 21, 600)])
    write_lines(tmp_path / "memory" / "rollout-0.jsonl", [sample(first, "rollout", 9, 9.9, 300)])
    device = device_with((0.5, 990), (9.5, 400), (10.5, 700), (11.5, 450), (20.5, 650))
    assert memory_by_phase(tmp_path, device) == {
        "peak_bytes_by_phase": {"policy": {"update": 600, "sync": 100}, "rollout": {"rollout": 300}},
        "device_peak_bytes_by_phase": {"update": 700, "sync": 450, "rollout": 400},
    }


def test_a_run_without_counted_steps_has_no_memory_by_phase(tmp_path: Path) -> None:
    write_lines(tmp_path / "ledger.jsonl", [STEP | {"step": 1}])
    assert memory_by_phase(tmp_path, device_with((1.0, 10))) == {}


def test_every_arm_of_rljob_is_a_valid_job() -> None:
    for arm in [*ARMS, "smoke"]:
        RLJobSpec.model_validate(manifest_of(arm, steps=4)["spec"])
    assert set(MODELS) <= set(SHAPES)


def test_an_arm_with_empty_caches_keeps_all_its_compiled_code_apart(tmp_path: Path) -> None:
    variables = variables_of("8b-cold", tmp_path)
    assert set(variables) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"}
    assert all(Path(directory).is_relative_to(tmp_path) for directory in variables.values())
    assert variables_of("8b", tmp_path) == {}


def test_rows_without_memory_by_phase_or_steps_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    old = {
        "arm": "8b",
        "seconds_per_step": 22.6,
        "seconds_by_phase": {"rollout": 9.2, "update": 13.1, "sync": 0.3},
        "device_peak_bytes": 88 << 30,
        "torch_peak_reserved_bytes": 84 << 30,
        "plan": {"optimizerOffload": True},
    }
    new = old | {
        "arm": "4b",
        "peak_bytes_by_phase": {"policy": {"update": 60 << 30}, "rollout": {"rollout": 20 << 30}},
        "device_peak_bytes_by_phase": {"update": 63 << 30, "rollout": 50 << 30},
    }
    draw(
        [old, new, {"arm": "14b", "message": "exit code 1"}],
        "NVIDIA H200",
        dict.fromkeys(ARMS, ""),
        tmp_path / "models.png",
    )
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
