"""TRL's GRPOTrainer in a process of its own, as an arm of a comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from bench.harness.record import require_package
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import GROUP_SIZE

COLOCATED: dict[str, Any] = {
    "num_generations": GROUP_SIZE,
    "bf16": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
}
"""Options of GRPOConfig for an engine on the trainer's GPU that sleeps during an update."""
WITH_LIGER: dict[str, Any] = {"gradient_checkpointing": False, "use_liger_kernel": True}


def trl_command(config: Path, options: Mapping[str, Any], *arguments: str) -> list[str]:
    """The command of `trl_steps` with the options, which are written to the file `config`."""
    config.write_text(yaml.safe_dump(dict(options)))
    return [sys.executable, "-m", "bench.programs.trl_steps", str(config), *arguments]


def trl_row(options: Mapping[str, Any], *arguments: str) -> Row:
    """The exit code of `trl_steps`, and what it measured. Exits with a message if a package is missing."""
    require_package("trl")
    if options.get("use_liger_kernel"):
        require_package("liger_kernel")
    command = trl_command(Path(mkdtemp()) / "trl.yaml", options, *arguments)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    return {"exit_code": done.returncode, **measured_by(done)}


def measured_by(done: subprocess.CompletedProcess[str]) -> Row:
    """The measurements that `trl_steps` printed last; empty if it failed."""
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}
