"""The controller needs no GPU and imports nothing that uses one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rljob_testing.patience import PATIENCE_SECONDS

_PROGRAM = """
import sys
from pathlib import Path
import rljob_trainer.pods.controller_pod
import rljob_trainer.runtime.run_command
from rljob_api.manifest import load_manifest
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.tasks.build import build_task

job = load_manifest(Path("examples/digits.yaml"))
model = resolve_model(job.spec.model.uri, Path(sys.argv[1]))
build_task(job.spec.task, load_tokenizer(model), 8, Path("."), 0).prompts(1, 8)
print([name for name in ("torch", "vllm", "ray") if name in sys.modules])
"""


def test_the_controller_imports_neither_torch_nor_vllm(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.strip() == "[]", done.stdout
