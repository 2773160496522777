"""Role processes that start as forks: the bits are those of processes that import their libraries themselves."""

from __future__ import annotations

from pathlib import Path

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import COLD, Run, rljob_run, write_manifest

_WARM = "with its imports done"


def test_a_warm_run_that_loses_its_engine_has_the_bits_of_a_cold_one(tmp_path: Path) -> None:
    manifest = write_manifest(
        tmp_path / "job.yaml",
        algorithm={"steps": 3, "promptsPerStep": 4, "groupSize": 4},
        faultInjection={"enabled": True},
    )
    cold = rljob_run(manifest, tmp_path / "cold", **COLD)
    warm = rljob_run(manifest, tmp_path / "warm", "--fault=WorkerLost@rollout:2")
    assert (cold.exit_code, warm.exit_code) == (ExitCode.COMPLETE, ExitCode.COMPLETE), cold.printed + warm.printed
    # Both attempts were warm; the lost process was noticed and named.
    assert [_starts(run, role) for run in (cold, warm) for role in ("policy", "rollout")] == [0, 0, 2, 2]
    assert "rollout-0 died" in warm.printed
    pids = [attempt["processes"]["rollout-0"] for attempt in warm.attempts]
    assert [f"process {pid} {_WARM}" in _log(warm, "rollout") for pid in pids] == [True, True]
    assert [_learned(step) for step in warm.steps] == [_learned(step) for step in cold.steps]
    weights = [(run.output / "model" / "model.safetensors").read_bytes() for run in (cold, warm)]
    assert weights[0] == weights[1]


def _learned(step: dict[str, object]) -> list[object]:
    return [step[name] for name in ("reward", "response", "tokens", "metrics")]


def _log(run: Run, role: str) -> str:
    return (run.output / "logs" / f"{role}-0.log").read_text()


def _starts(run: Run, role: str) -> int:
    return _log(run, role).count(_WARM)
