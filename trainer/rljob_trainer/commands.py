"""The commands that train: `rljob run`; in pods `rljob controller` and `rljob worker`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from rljob_client.app import app, examples


@app.command(
    epilog=examples(
        "rljob run examples/digits.yaml --output runs/digits",
        "rljob run job.yaml --device cpu --plot",
        "rljob run examples/digits-faults.yaml --fault ActivationSpike@update:3",
    )
)
def run(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="RLJob manifest, as for kubectl apply -f.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Output directory, from which the same command resumes. Default: runs/NAME-OF-THE-JOB.",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs if there are any, otherwise the CPU.")
    ] = "auto",
    plot: Annotated[bool, typer.Option("--plot", metavar="", help="Draw plots when the run ends.")] = False,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS@PHASE:STEP[xTIMES]",
            help="Inject a fault, such as ActivationSpike@update:3. Requires spec.faultInjection.enabled. Repeatable.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Initial memory plan, as JSON. Default: computed from job and machine."),
    ] = None,
) -> None:
    """Train the job in MANIFEST on this machine. Run the same command again to resume a stopped run.

    \b
    Exit codes:
      0    complete
      1    unexpected error
      2    invalid manifest, or a job of another trainer
      80   GPU out of memory
      81   host out of memory
      82   /dev/shm full
      83   a policy rank or an engine died
      84   unusable model, task or reward
      85   output directory full, unwritable or in use
      130  stopped by SIGINT
      143  stopped by SIGTERM
    """
    from rljob_trainer.runtime.run_command import run_manifest

    raise typer.Exit(run_manifest(manifest, output, device=device, faults=fault or (), plan=plan, plot=plot))


@app.command(hidden=True)
def controller() -> None:
    """Run the controller of a job, in a pod that the operator created and configured by environment variables."""
    from functools import partial

    from rljob_trainer.pods.init_process import continue_under_init
    from rljob_trainer.pods.termination import report_silent_exit

    continue_under_init(partial(report_silent_exit, os.environ))
    # Imported in the child: the init process stays small, and forks before threads exist.
    from rljob_trainer.pods.controller_pod import run_controller

    raise typer.Exit(run_controller(os.environ))


@app.command(hidden=True)
def worker() -> None:
    """Run a worker of a job, in a pod that the operator created and configured by environment variables."""
    from rljob_trainer.pods.init_process import continue_under_init

    continue_under_init()
    from rljob_trainer.pods.worker_pod import run_worker

    raise typer.Exit(run_worker(os.environ))
