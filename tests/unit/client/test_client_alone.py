"""`rljob` in an environment without the trainer and its packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.unit.ledger.samples import write_ledger

ROOT = Path(__file__).parents[3]
WITHOUT_TRAINER = """
import sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "torch", "transformers", "vllm"):
            raise ModuleNotFoundError(name)

sys.path = [path for path in sys.path if not Path(path, "rljob_trainer").is_dir()]
sys.meta_path.insert(0, Absent())
from rljob_client.__main__ import main
main()
"""


def rljob(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TRAINER, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_a_manifest_is_checked_as_far_as_possible(tmp_path: Path) -> None:
    digits = ROOT / "examples" / "digits.yaml"
    large_model = re.sub("uri: .*", "uri: hf://Qwen/Qwen3-8B", digits.read_text())
    (tmp_path / "job.yaml").write_text(large_model)
    done = rljob("validate", digits, tmp_path / "job.yaml")
    assert done.returncode == 0
    assert done.stderr.count("learningRate: 0.003 is high for a pretrained model") == done.stderr.count("\n") == 1
    small, large = done.stdout.split("digits.yaml: valid")
    assert "model, task and engineArgs are not checked" in small
    assert "predicted on" not in small
    assert "predicted on a GPU: " in large


def test_a_log_is_diagnosed() -> None:
    log = ROOT / "tests" / "data" / "oom" / "ActivationSpike" / "induced-attention-over-a-long-text.txt"
    assert "ActivationSpike" in rljob("diagnose", log).stdout


def test_a_run_is_reported(tmp_path: Path) -> None:
    write_ledger(tmp_path, [0.1, 0.2, 0.3])
    done = rljob("report", tmp_path)
    assert [Path(line).is_file() for line in done.stdout.splitlines()] == [True], done.stderr


def test_a_fetch_asks_for_a_cluster(tmp_path: Path) -> None:
    done = rljob("fetch", "sums", KUBECONFIG=str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "expected a kubeconfig with a current context, found" in done.stderr


def test_run_is_refused_with_advice() -> None:
    done = rljob("run", "job.yaml", COLUMNS="300", NO_COLOR="1")
    assert done.returncode == 2
    assert "expected the distribution rljob-trainer, found none; install it (make setup" in done.stderr
