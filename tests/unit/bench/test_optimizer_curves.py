"""Curves by the form of the optimizer's state: the jobs, the verdict, the table and the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.programs.optimizer_curves import (
    ARMS,
    OTHER_MOMENTS,
    WORKLOADS,
    last_quarter,
    manifest_of,
    rounded,
    rows_of,
)
from bench.report.optimizer_curves import block, draw
from rljob_api.job import RLJobSpec


def run(seed: int, rewards: list[float]) -> dict[str, Any]:
    return {"seed": seed, "reward": rewards, "loss": [0.1] * len(rewards), "grad_norm": [1.0] * len(rewards)}


def result(**last_rewards: list[float]) -> dict[str, Any]:
    """`last_rewards`: by arm, the rewards of the last quarter of four steps, a seed each."""
    runs = {
        arm.replace("_", " ").replace("float32 streamed", "float32, streamed"): [
            run(seed, [0.0, 0.0, 0.5, value]) for seed, value in enumerate(values)
        ]
        for arm, values in last_rewards.items()
    }
    versions = {"torch": "2.13.0"}
    place = {"script": "bench/programs/optimizer_curves.py", "date": "2026-11-24", "device": "a CPU"}
    return place | {"versions": versions, "note": "a small model", "rows": rows_of(runs)}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_valid_job_with_its_settings(arm: str, workload: str) -> None:
    spec = RLJobSpec.model_validate(manifest_of(WORKLOADS[workload], arm, steps=7, seed=3)["spec"])
    assert (spec.algorithm.steps, spec.algorithm.seed) == (7, 3)
    assert (spec.memory.optimizer_offload == "Enabled") == ("streamed" in arm)
    assert (spec.model.dtype == "bfloat16") == ("weights" in arm)
    assert (spec.policy.optimizer.moments == "float32") == ("moments" not in arm)


def test_every_data_type_of_the_moments_is_an_arm() -> None:
    assert {f"{dtype} moments" for dtype in OTHER_MOMENTS} <= ARMS.keys()


def test_arms_are_compared_with_float32_seed_by_seed() -> None:
    rows = result(float32=[0.8, 0.9, 0.86], bfloat16_moments=[0.82, 0.87])["rows"]
    verdict = rows[-1]["last_quarter"]
    assert verdict["noise"] == pytest.approx(0.1), "of all seeds of float32"
    assert verdict["differences"] == {"bfloat16 moments": pytest.approx(-0.03)}
    assert verdict["largest_difference"] == pytest.approx(-0.03)
    assert verdict["is_within_noise"]
    assert rows[-1]["all_steps"]["noise"] == pytest.approx(0.025)


def test_a_difference_beyond_the_noise_of_the_seeds_is_reported() -> None:
    [*_, verdict] = result(float32=[0.8, 0.81], bfloat16_moments=[0.8, 0.7])["rows"]
    assert not verdict["last_quarter"]["is_within_noise"]


def test_an_arm_is_identical_only_if_every_value_of_every_seed_is() -> None:
    rows = result(float32=[0.8, 0.9, 0.7], float32_streamed=[0.8, 0.9], bfloat16_moments=[0.8, 0.9 + 1e-15])["rows"]
    assert [row["identical_to"] for row in rows[:3]] == [None, "float32", None]


def test_the_last_quarter_and_the_recorded_digits() -> None:
    assert last_quarter(run(0, [0.0] * 6 + [0.5, 1.0])) == 0.75
    assert rounded(run(4, [1 / 3]))["reward"] == [0.333333]
    assert rounded(run(4, [1 / 3]))["seed"] == 4


def test_table_and_figure_show_every_arm(tmp_path: Path) -> None:
    shown = result(float32=[0.8, 0.9, 0.7], float32_streamed=[0.8, 0.9], bfloat16_moments=[0.81, 0.85])
    page = block(shown)
    assert "| float32, streamed | 0.850 | +0.0000 | 0.338 | +0.0000 | equal to float32 |" in page
    assert "| bfloat16 moments | 0.830 | -0.0500 |" in page
    assert "| noise: seeds of float32 | | 0.2000 |" in page
    draw(shown, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
