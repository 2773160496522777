"""`rljob export`: the model of a checkpoint in Hugging Face format, and its upload to the hub."""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path
from typing import Literal

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.manifest import ManifestError, load_manifest
from rljob_client.errors import BadInput, OutputUnavailable, RunError
from rljob_client.model_files import BEST_MODEL, model_of_step
from rljob_client.run_directory.durable_files import require_free, writing
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import attempt_records
from rljob_memory.budget import setup_of_facts
from rljob_memory.sizes import human_bytes
from rljob_trainer.hardware import Device
from rljob_trainer.ledger.checkpoint_manifest import find_damage
from rljob_trainer.ledger.checkpoint_store import written_steps
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models import hub
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.runtime.role_settings import adapters, base_model, dtype_of


def export(
    directory: Path,
    step: int | Literal["best"] | None,
    output: Path | None,
    initial_model: Path | None,
    push_to_hub: str | None,
) -> ExitCode:
    """Export the model, print where it is, and return the exit code.

    `directory`: output directory of a run. `step`: None: the newest checkpoint. `output`: None: `models/step-…` in
    `directory`. `initial_model`: None: that of the job's URI. `push_to_hub`: repository for an upload.
    """
    try:
        model = _exported(OutputDirectory(directory), step, output, initial_model)
        size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
        print(f"{human_bytes(size)} in {model}", flush=True)
        if push_to_hub is not None:
            print(hub.push(model, push_to_hub))
    except ManifestError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    except RunError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.COMPLETE


def _exported(
    run: OutputDirectory, step: int | Literal["best"] | None, output: Path | None, initial_model: Path | None
) -> Path:
    """The directory of the model, which is written unless the run has exported it."""
    if not run.manifest.is_file():
        raise OutputUnavailable(f"expected the output directory of a run, found no {run.manifest}; correct the path")
    spec = load_manifest(run.manifest).spec
    steps = written_steps(run.checkpoints)
    if step is None:
        step = max(steps, default=None)
    written = run.path / (BEST_MODEL if step == "best" else model_of_step(step or 0))
    target = output or written
    if written.is_dir():
        if target != written:
            require_free(target)
            with writing(target):
                shutil.copytree(written, target, dirs_exist_ok=True)
        return target
    if step == "best":
        raise OutputUnavailable(f"expected {written}, found none: it is written with evaluation.keepBest: true")
    checkpoint = run.checkpoints / f"step-{step or 0:06d}"
    if step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise OutputUnavailable(
            f"expected a checkpoint in {run.checkpoints}{'' if step is None else f' of step {step}'}, found those of "
            f"these steps: {found}; name one of them by --step"
        )
    if damage := find_damage(checkpoint, step):
        raise OutputUnavailable(f"expected a whole checkpoint in {checkpoint}, found damage: {damage}; name another")
    require_free(target)
    _write(spec, checkpoint, _source(spec, initial_model), _device(run, spec), target)
    return target


def _write(spec: RLJobSpec, checkpoint: Path, source: Path, device: Device, target: Path) -> None:
    """Write the model of `checkpoint` to `target`, which exists only if it is complete."""
    import torch

    from rljob_trainer.policy.checkpoint_model import CheckpointModel

    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    dtype = getattr(torch, dtype_of(spec, device))
    model = CheckpointModel(checkpoint, dtype, source, adapters(spec, source), base_model(spec, source))
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            model.write(partial)
            if target.is_dir():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _source(spec: RLJobSpec, given: Path | None) -> Path:
    """The directory of the initial model. Only adapters that are merged need its weights."""
    if given is not None:
        return given
    scheme, _, location = spec.model.uri.partition("://")
    try:
        if scheme == "hf" and spec.policy.lora is None:
            return hub.resolve_description(location)
        return resolve_model(spec.model.uri)
    except BadInput as error:
        raise BadInput(f"{error}; or name a directory with the initial model by --model") from error


def _device(run: OutputDirectory, spec: RLJobSpec) -> Device:
    """The device of the run, which decides the dtype of its model."""
    attempts = attempt_records(read_ledger(run.ledger).records)
    setup = setup_of_facts(attempts[-1].plan_facts) if attempts else None
    if setup is not None:
        return setup.hardware.device
    return "cuda" if spec.policy.gpus_per_replica else "cpu"
