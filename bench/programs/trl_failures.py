"""TRL programs that run out of memory on one GPU: the cause that is named, and the changes until they train.

    python -m bench.programs.trl_failures [FAILURE...]

Failures (GRPO of Qwen3-0.6B's shape in float32, colocated with vLLM, responses of 512 tokens; TRL is not modified):

    update             128 responses a micro-batch, without gradient checkpointing
    awake              the engine has 85 % of the GPU and does not sleep during the update
    engine-too-large   the engine asks for more than the policy has left free

Each attempt runs under the probe. Its diagnosis and the recovery engine choose the next attempt's changes, as the
operator does. Needs TRL. Records one row for each failure in `bench/results/trl_failures.json`, after those that it
already has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.harness.needs import require_gpus, require_package
from bench.harness.record import RESULTS, record, recorded
from bench.harness.shapes import SHAPES
from bench.programs.adapter_recovery import job_spec, kept_directory, recovered
from rljob_trainer.models.resolve import resolve_model

NAME = "trl_failures"
OPTIONS = {
    "update": ["--micro-batch", "128"],
    "awake": ["--micro-batch", "32", "--awake", "--engine-share", "0.85"],
    "engine-too-large": ["--micro-batch", "16", "--engine-share", "0.985"],
}
STEPS = 3


def main(failures: list[str], results: Path, logs: Path | None) -> None:
    require_package("trl")
    require_gpus(1)
    rows = recorded(NAME, results)
    program = [sys.executable, "-m", "bench.programs.trl_steps", str(resolve_model(f"random://qwen3?{SHAPES['0.6b']}"))]
    for failure in failures or list(OPTIONS):
        command = [*program, "--steps", str(STEPS), *OPTIONS[failure]]
        with kept_directory(logs, failure) as directory:
            attempts = recovered(job_spec("TRL", gpus=1), command, None, directory)
        row = {"failure": failure, "options": OPTIONS[failure], "attempts": attempts}
        rows = [*(other for other in rows if other["failure"] != failure), row]
        note = "TRL under the probe, adapter TRL; each attempt has the changes that the one before it led to"
        print(record(NAME, rows, note, results), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("failures", nargs="*", choices=[*OPTIONS, []], metavar="FAILURE", help=", ".join(OPTIONS))
    parser.add_argument("--logs", type=Path, help="where the output of the attempts is kept; default: nowhere")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
