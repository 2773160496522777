"""A run with a loss and an advantage of the user: the controller and the policy ranks load them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import rljob_run, write_manifest

SOURCE = """
def loss(tokens, settings):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    return -tokens.advantages * ratio, {"clip_high": ratio * 0 + settings.clip_high}

def advantage(groups, settings):
    return groups.rewards - groups.rewards.mean()
"""


def test_functions_of_the_user_train_and_may_not_change(tmp_path: Path) -> None:
    own = tmp_path / "own_of_run.py"
    own.write_text(SOURCE)
    algorithm = {"name": "gspo", "loss": "own_of_run:loss", "advantage": "own_of_run:advantage", "maxStaleness": 0}
    manifest = write_manifest(tmp_path / "job.yaml", algorithm=algorithm | {"steps": 2})
    run = rljob_run(manifest, tmp_path / "run")
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert [step["metrics"]["clip_high"] for step in run.steps] == pytest.approx([4e-4] * 2)
    assert all(step["metrics"]["grad_norm"] > 0 for step in run.steps)
    assert all(0 < step["metrics"]["importance_ess"] <= 1.0001 for step in run.steps)

    own.write_text(SOURCE.replace("* ratio,", "* ratio * 2,"))
    manifest = write_manifest(tmp_path / "job.yaml", algorithm=algorithm | {"steps": 3})
    changed = rljob_run(manifest, tmp_path / "run")
    assert changed.exit_code == ExitCode.BAD_INPUT, changed.printed
    assert "has committed 2 steps, found others: algorithm code (own_of_run.py)" in changed.printed

    own.write_text(SOURCE.replace("return -tokens.advantages * ratio", "return -tokens.advantage * ratio"))
    manifest = write_manifest(tmp_path / "job.yaml", algorithm=algorithm | {"steps": 3})
    broken = rljob_run(manifest, tmp_path / "another")
    assert broken.exit_code == ExitCode.BAD_INPUT, broken.printed
    printed = broken.printed.replace("\n", " ")
    assert "raised AttributeError: 'Tokens' object has no attribute 'advantage'" in printed, broken.printed
    assert "own_of_run.py, line 4)" in printed, broken.printed
