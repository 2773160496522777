"""The command line: `rljob run`, `validate`, `plot` and `diagnose`; in pods `rljob controller` and `rljob worker`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rljob_api.exit_codes import ExitCode

app = typer.Typer(
    name="rljob",
    help="Reinforcement learning of language models with vLLM and FSDP2: runs RLJob manifests on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def run(
    manifest: Annotated[Path, typer.Argument(help="The RLJob manifest, as for `kubectl apply -f`.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Where the run's files go, and where a stopped run goes on. Default: runs/NAME-OF-THE-JOB."),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="auto: the GPUs where there are any, else the CPU.")] = (
        DeviceChoice.AUTO
    ),
    plot: Annotated[bool, typer.Option("--plot", help="Draw the plots when the run ends.")] = False,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS@PHASE:STEP[xTIMES]",
            help="Make the job fail on purpose, such as ActivationSpike@update:3; its manifest has to allow it.",
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="The memory plan to begin with, as JSON. Default: it is worked out.")
    ] = None,
) -> None:
    """Train as MANIFEST says, on this machine. Started again after a stop, it goes on at the step it was in.

    \b
    Exit codes:
      0    complete
      1    unexpected error
      2    invalid manifest
      80   GPU out of memory
      81   host out of memory
      82   /dev/shm full
      83   a policy rank or an engine died
      84   unusable model, task or reward
      85   output directory full, unwritable or in use
      130  stopped by SIGINT
      143  stopped by SIGTERM
    """
    from rljob_trainer.runtime.run_command import RunOptions, run_manifest

    options = RunOptions(output, device.value, tuple(fault or ()), plan, plot)
    raise typer.Exit(run_manifest(manifest, options))


@app.command()
def validate(
    manifests: Annotated[list[Path], typer.Argument(help="RLJob manifests.")],
) -> None:
    """Print every problem of the MANIFESTS: where it is, and what to write instead."""
    from rljob_api.manifest import ManifestError, load_manifest

    failed = False
    for path in manifests:
        try:
            load_manifest(path)
        except ManifestError as error:
            failed = True
            typer.echo(str(error), err=True)
        else:
            typer.echo(f"{path}: valid")
    if failed:
        raise typer.Exit(ExitCode.INVALID_MANIFEST)


@app.command()
def plot(
    directory: Annotated[Path, typer.Argument(help="The output directory of a run.")],
    output: Annotated[Path | None, typer.Option(help="Where the pictures go. Default: DIRECTORY/plots.")] = None,
) -> None:
    """Draw reward, timing by phase and memory by phase of the run in DIRECTORY, as PNG and SVG."""
    from rljob_trainer.errors import TrainerError
    from rljob_trainer.plot import plot_run

    try:
        for path in plot_run(directory, output):
            typer.echo(path)
    except TrainerError as error:
        typer.echo(f"rljob: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@app.command()
def diagnose(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR",
            help="A log, a termination message, an allocator snapshot, or a directory of them; - for standard input.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, best first.")] = False,
) -> None:
    """Say why a job ran out of memory, with the numbers and what to change. Any trainer's job, not only ours.

    \b
    Exit codes:
      0    diagnosed, or nothing failed of memory
      2    FILE|DIR cannot be read
    """
    from rljob_trainer.diagnose_command import run_diagnose

    raise typer.Exit(run_diagnose(path, as_json=as_json))


@app.command(hidden=True)
def controller() -> None:
    """Drive a job from its controller's pod, as the pod's environment says. For pods that the operator makes."""
    from functools import partial

    from rljob_trainer.pods.init_process import continue_under_init
    from rljob_trainer.pods.termination import tell_silent_end

    continue_under_init(partial(tell_silent_end, os.environ))
    from rljob_trainer.pods.controller_pod import run_controller

    raise typer.Exit(run_controller(os.environ))


@app.command(hidden=True)
def worker() -> None:
    """Lend a worker's pod to a job, as the pod's environment says. For pods that the operator makes."""
    from rljob_trainer.pods.init_process import continue_under_init

    continue_under_init()
    from rljob_trainer.pods.worker_pod import run_worker

    raise typer.Exit(run_worker(os.environ))
