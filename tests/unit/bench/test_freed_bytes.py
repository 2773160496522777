"""Expected and freed bytes: which effects are shown, and how close the estimates are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.harness.record import RESULTS
from bench.report.freed_bytes import Effect, draw, effects, table

GIB = 1 << 30
READ = ("memory_mitigation_cost", "memory_rollout_role", "recovery_in_pods", "recovered_jobs")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in READ:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    return tmp_path


def of_jobs(results: Path, *rows: dict[str, Any]) -> list[Effect]:
    (results / "recovered_jobs.json").write_text(json.dumps({"rows": rows}))
    (results / "recovery_in_pods.json").write_text(json.dumps({"rows": []}))
    return [effect for effect in effects(results) if effect.how == "recovery"]


def remedy(setting: str, expected: int | None, observed: int | None) -> dict[str, Any]:
    return {"setting": setting, "expected_bytes": expected, "observed_bytes": observed}


MEASURED = [effect for effect in effects() if effect.how == "measurement"]


@pytest.mark.parametrize("effect", MEASURED, ids=[effect.setting for effect in MEASURED])
def test_the_effect_of_a_setting_is_estimated_within_a_third(effect: Effect) -> None:
    assert effect.is_close, f"{effect.setting} is off by {effect.off_by:+.0%}"


def test_six_settings_were_measured_by_themselves() -> None:
    assert {effect.setting for effect in MEASURED} == {
        "microBatchTokens",
        "logprobChunkTokens",
        "optimizerOffload",
        "activationCheckpointing",
        "weightExport",
        "rolloutSleep",
    }


def test_recoveries_without_an_effect_or_from_injected_faults_are_omitted(results: Path) -> None:
    found = of_jobs(
        results,
        {"job": "calm", "arm": "calm"},
        {"job": "a", "remedies": [remedy("kvCache", 4 * GIB, None), remedy("emptyCache", 9 * GIB, 10 * GIB)]},
        {"job": "b", "remedies": [remedy("syncBucketSize", GIB, -GIB), remedy("emptyCache", None, GIB)]},
        {"job": "c", "remedies": [remedy("expandableSegments", 65 * GIB, 190 * GIB)], "injected": True},
    )
    assert [(effect.setting, effect.expected_bytes) for effect in found] == [("emptyCache", 9 * GIB)]
    assert found[0].is_close


def test_an_estimate_that_is_off_by_over_a_third_is_not_close(results: Path) -> None:
    [low, high] = of_jobs(results, {"remedies": [remedy("x", 40 * GIB, 80 * GIB), remedy("y", 12 * GIB, 8 * GIB)]})
    assert not low.is_close
    assert not high.is_close
    assert "| `x` | in a recovery | 40.00 GiB | 80.00 GiB | -50 % |" in table([low, high])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(MEASURED, tmp_path / "freed.png")
    assert (tmp_path / "freed.png").read_bytes().startswith(b"\x89PNG")
