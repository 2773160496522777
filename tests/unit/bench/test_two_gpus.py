"""The comparisons on two GPUs: their manifests, the idle share of each GPU, and their tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness.gpu_use import idle_of_each_gpu
from bench.harness.run_arms import _run_steps, memory_of
from bench.programs import tensor_parallel, topologies
from bench.programs.memory_rollout_role import merged
from bench.report import mitigations
from bench.report import topologies as report
from rljob_api.job import RLJobSpec


@pytest.mark.parametrize("arm", topologies.NAMES)
@pytest.mark.parametrize("smoke", [True, False])
def test_every_arm_of_topologies_is_a_valid_job(arm: str, smoke: bool) -> None:
    spec = RLJobSpec.model_validate(topologies.spec_of(arm, 6, smoke))
    assert spec.topology == ("Colocated" if "colocated" in arm else "Disaggregated")
    assert spec.algorithm.max_staleness == ("overlapped" in arm)
    assert ("hidden=4096" in spec.model.uri) == ("8b" in arm and not smoke)


@pytest.mark.parametrize("arm", list(tensor_parallel.SIZES))
def test_every_arm_of_tensor_parallel_is_a_valid_job(arm: str) -> None:
    spec = RLJobSpec.model_validate(tensor_parallel.spec_of(arm, 4, smoke=False))
    assert spec.rollout.tensor_parallel_size == int(arm[2])
    assert ("hidden=5120" in spec.model.uri) == ("14b" in arm) == (spec.policy.optimizer.moments == "bfloat16")


def test_idle_shares_count_only_the_time_of_the_steps() -> None:
    steps = [{"committed_at": 12.0, "total_seconds": 2.0}, {"committed_at": 22.0, "total_seconds": 2.0}]
    samples = [(9.0, (100, 100)), (11.0, (100, 0)), (15.0, (100, 100)), (21.0, (50, 0)), (30.0, (0, 0))]
    assert idle_of_each_gpu(samples, steps) == [0.25, 1.0]
    assert idle_of_each_gpu([], steps) == []


def row(arm: str, **values: Any) -> dict[str, Any]:
    figures = {
        "arm": arm,
        "exit_code": 0,
        "seconds_per_step": 12.34,
        "seconds_by_phase": {"rollout": 8.0, "reward": 0.01, "update": 4.0},
        "tokens_per_second": 21_000.4,
        "idle_share_of_gpus": [0.4, 0.61],
        "logprob_diff_max": 0.0214,
        "memory": {"policy-0": {"gpu_used_bytes": 30 << 30}, "rollout-0": {"gpu_used_bytes": 20 << 30}},
        "plan": {"kvCache": 8 << 30},
    }
    return figures | values


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "script": "bench/programs/topologies.py",
        "date": "2026-12-01",
        "device": "2 × NVIDIA H200",
        "versions": {},
        "note": "Note",
        "rows": list(rows),
    }


def test_the_tables_have_a_row_for_each_arm_and_name_those_that_failed() -> None:
    failed = {"arm": "overlapped", "exit_code": 80}
    table = report.topologies(result(row("disaggregated"), failed))
    assert (
        "| disaggregated | 12.3 | rollout 8.0, update 4.0 | 21,000 | 40 % / 61 % "
        "| policy-0 30.0 GiB, rollout-0 20.0 GiB | 0.021 |"
    ) in table
    assert table.endswith("Failed: `overlapped` (exit code 80).\n")
    assert "| tp2-14b | 12.3 | 8.0 | 21,000 | 8.0 GiB |" in report.tensor_parallel(result(row("tp2-14b")))


def test_rows_of_another_shape_are_kept() -> None:
    old = [{"arm": "engine alone"}, {"arm": "engine and policy module"}]
    new = [{"arm": "engine alone", "shape": "8b"}]
    assert merged(old, new) == [*old, *new]
    again = [{"arm": "engine alone", "shape": "0.6b"}]
    assert merged([*old, *new], again) == [*again, *new]
    bytes_ = {"awake_bytes": 1 << 30, "asleep_bytes": 1 << 30}
    assert "| engine alone, 8B | 1.0 GiB |" in mitigations.rollout_role(result({**new[0], **bytes_}))


def test_a_memory_log_may_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.jsonl"
    log.write_text('{"device_total_bytes": 9, "device_free_bytes": 2, "peak_reserved_bytes": 5}\n{"device_total_by')
    assert memory_of(log) == {"gpu_used_bytes": 7, "peak_reserved_bytes": 5, "peak_rss_bytes": 0}


def test_a_measured_job_is_killed_before_its_last_step(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "file = pathlib.Path(sys.argv[1]) / 'ledger.jsonl'\n"
        "for step in range(1, 9):\n"
        "    with file.open('a') as lines: lines.write('{\"kind\": \"step\"}\\n')\n"
        "    time.sleep(0.5 if step < 2 else 3600)\n"
    )
    assert _run_steps([sys.executable, "-c", program, str(tmp_path)], tmp_path, 2) == 0
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 2
    assert _run_steps([sys.executable, "-c", "raise SystemExit(80)"], tmp_path / "none", 2) == 80
