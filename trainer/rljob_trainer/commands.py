"""The commands that train: `rljob run`; in pods `rljob controller` and `rljob worker`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from rljob_client.app import Quiet, Settings, app, examples


@app.command(
    epilog=examples(
        "rljob run examples/digits.yaml --output runs/digits",
        "rljob run job.yaml --device cpu --report",
        "rljob run job.yaml --set algorithm.steps=100 --set policy.gpusPerReplica=4 --dry-run",
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
    settings: Settings = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", metavar="", help="Check the job as validate does, print its plan, and start nothing."
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", metavar="", help="Write DIR/report.html when the run ends.")
    ] = False,
    quiet: Quiet = False,
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
      1    unexpected error; with --dry-run, the job does not fit
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
    given = tuple(settings or ())
    if dry_run:
        from rljob_client.plan_command import PlanOptions, run_plan
        from rljob_client.validation.validate_command import Validation

        found = Validation(settings=given, quiet=quiet).check([str(manifest)])
        raise typer.Exit(found or run_plan(manifest, PlanOptions(settings=given)))
    from rljob_trainer.runtime.run_command import run_manifest

    raise typer.Exit(
        run_manifest(
            manifest,
            output,
            device=device,
            faults=fault or (),
            plan=plan,
            report=report,
            settings=given,
            quiet=quiet,
        )
    )


@app.command(
    epilog=examples(
        "rljob export runs/digits",
        "rljob export runs/digits --step 40 --output my-model",
        "rljob export runs/digits --step best --push-to-hub org/name",
    )
)
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of a run.")],
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best", help="Step of the checkpoint, or best. Default: the newest checkpoint."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="New directory. Default: DIR/models/step-N."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Directory of the initial model. Default: that of the job's model.uri."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload the model to this repository of the Hugging Face Hub."),
    ] = None,
) -> None:
    """Write the model of a checkpoint in Hugging Face format. Needs no GPU; the run may be in progress.

    \b
    Exit codes:
      0    exported
      1    the hub is not reachable
      2    invalid options or manifest
      84   the initial model cannot be used, or the hub refuses the token or the name
      85   no such checkpoint, or PATH is not empty or not writable
    """
    from rljob_trainer.export_command import export as run

    chosen: int | Literal["best"] | None = None
    if step is not None:
        if step != "best" and not (step.isdecimal() and int(step)):
            raise typer.BadParameter(f"expected the number of a step, or best, found {step}", param_hint="--step")
        chosen = "best" if step == "best" else int(step)
    raise typer.Exit(run(directory, chosen, output, model, push_to_hub))


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
