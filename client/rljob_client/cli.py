"""The commands that need no trainer, and those of the trainer if it is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from rljob_client.app import Quiet, Settings, app, examples

__all__ = ["app"]

if find_spec("rljob_trainer") is not None:
    import_module("rljob_trainer.commands")  # first in the help

AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print a JSON object.")]


@app.command(
    epilog=examples(
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
    settings: Settings = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check manifests: the schema, suspicious values, and everything that a job needs. Print each finding with its
    line.

    Read the model's configuration and tokenizer, every line of the data set and the engine arguments, and call the
    reward function once, in a separate process. These checks require the trainer.

    \b
    Exit codes:
      0    all manifests are valid; there may be warnings
      2    a manifest is invalid, or has warnings with --strict
      84   unusable model, task, reward or engine arguments
    """
    from rljob_client.validation.validate_command import Validation

    raise typer.Exit(Validation(schema_only, strict, settings or (), as_json, quiet).check(manifests))


@app.command(
    epilog=examples(
        "rljob plan job.yaml", "rljob plan job.yaml --gpu a100-40 --gpus 4", "rljob plan grpo.yaml --from trl --gpus 8"
    )
)
def plan(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="RLJob manifest, or the file of --from.")],
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE|SIZE",
            help="Type of GPU, such as h200 or a100-40, or memory of one, such as 80Gi. "
            "Default: that of this machine, else h100.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs of the policy. Default: those of the manifest.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory of all machines, such as 1Ti. Default: that of this machine if it has GPUs, "
            "else 256Gi for each GPU.",
        ),
    ] = None,
    source: Annotated[
        Literal["trl", "verl"] | None,
        typer.Option("--from", help="Read a configuration of this trainer instead of a manifest: YAML, or a script."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", metavar="", help="Compare all known types of GPU: the fewest of each that fit.")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Predict whether a job fits its GPUs and its host, what each phase needs, and how long a step takes. Starts
    nothing.

    \b
    Exit codes:
      0    the job fits
      1    it does not fit
      2    invalid manifest, options or model
    """
    from rljob_client.plan_command import PlanOptions, run_plan

    raise typer.Exit(run_plan(manifest, PlanOptions(gpu, gpus, host, source, sweep, as_json, settings or ())))


@app.command(epilog=examples("rljob report runs/digits --open", "rljob report runs/digits -o /tmp/digits.html"))
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of a run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The report. Default: DIR/report.html.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", metavar="", help="Open the report in the browser.")] = False,
) -> None:
    """Write a report of a run as one HTML file: learning curves, samples, memory, time, failures, configuration.

    The run may be in progress, or may have failed. The file loads nothing from the network.
    """
    from rljob_client.errors import RunError
    from rljob_client.report import write_report

    try:
        path = write_report(directory, output)
    except RunError as error:
        typer.echo(f"rljob: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(path)
    if show:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            typer.echo("rljob: --open: expected a browser, found none; open the file yourself", err=True)


@app.command(
    epilog=examples(
        "rljob init", "rljob init --model hf://Qwen/Qwen3-0.6B --task prompts.jsonl --reward rewards:score --gpus 8"
    )
)
def init(
    output: Annotated[Path, typer.Argument(metavar="[FILE]", help="The manifest to write.")] = Path("job.yaml"),
    model: Annotated[
        str | None, typer.Option(metavar="URI", help="Model, such as hf://Qwen/Qwen3-0.6B. Default: a tiny random one.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="digits, a data set of reasoning-gym such as chain_sum, one of the hub such as openai/gsm8k, a file "
            "such as prompts.jsonl or prompts.parquet, or module:function.",
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Function that returns the reward of a response.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs of the policy; 0 for CPUs. Default: 1.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Number of steps. Default: 60.")] = None,
    algorithm: Annotated[str | None, typer.Option(metavar="NAME", help="Algorithm. Default: grpo.")] = None,
    settings: Settings = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace an existing file.")] = False,
) -> None:
    """Write a manifest with comments, which validate accepts. --set adds other fields.

    \b
    Exit codes:
      0    written
      2    an option is invalid, or FILE exists
    """
    from rljob_client.init_command import Choices, write_manifest

    raise typer.Exit(
        write_manifest(output, Choices(model, task, reward, gpus, steps, algorithm, settings or ()), force)
    )


@app.command(epilog=examples("rljob env", "rljob env --json"))
def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions, GPUs, driver, limits, and variables that change memory. No secrets."""
    from rljob_client.env_command import print_environment

    print_environment(as_json=as_json)


@app.command(epilog=examples("rljob show runs/digits", "rljob show runs/digits --step 20 --json"))
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of a run.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Step. Default: the last one with samples.")] = None,
    kind: Annotated[
        Literal["train", "evaluation"] | None,
        typer.Option(help="Samples of the training or of an evaluation. Default: both."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print a JSON list.")] = False,
) -> None:
    """Show prompts and responses of a step, with their rewards. The run may be in progress.

    \b
    Exit codes:
      0    shown
      1    there are no such samples
    """
    from rljob_client.show_command import show as run

    raise typer.Exit(run(directory, step, kind, as_json=as_json))


@app.command(
    epilog=examples(
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
            metavar="NAME", help="Read the logs and the termination status of a pod of the cluster. Repeatable."
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Read those of all pods of a job of any kind in the cluster.")
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
    from rljob_client.diagnose_command import run_diagnose

    if not (pod or job):
        if not paths:
            raise typer.BadParameter("name a FILE, a DIR, --pod or --job", param_hint="FILE|DIR")
        raise typer.Exit(run_diagnose(paths, as_json=as_json, explain=explain, exit_code=exit_code))
    from rljob_client.api_errors import KubernetesError
    from rljob_client.api_server import ApiServer
    from rljob_client.pod_evidence import collect_pods

    try:
        with collect_pods(ApiServer(namespace=namespace), pods=pod or [], job=job) as collected:
            sources = [*(paths or []), *collected]
            raise typer.Exit(run_diagnose(sources, as_json=as_json, explain=explain, exit_code=exit_code))
    except KubernetesError as problem:
        typer.echo(f"rljob: {problem}", err=True)
        raise typer.Exit(2) from None


@app.command(
    epilog=examples(
        "rljob fetch digits",
        "rljob fetch digits -n research -o my-model",
        "rljob fetch digits --step best",
        "rljob fetch digits --path logs",
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
    step: Annotated[
        str | None,
        typer.Option(
            metavar="N|best",
            help="Fetch the model of this step (checkpoint.exportEverySteps) or of the best one (evaluation.keepBest).",
        ),
    ] = None,
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
    """Fetch the trained model of a job from its volume in the cluster, through a small pod.

    \b
    Exit codes:
      0    fetched
      1    no such job or directory, or the cluster refused
      84   the fetched model is damaged
      85   DIR is not empty or not writable
    """
    from rljob_client.api_server import ApiServer
    from rljob_client.errors import RunError
    from rljob_client.fetch_command import fetch as run
    from rljob_client.model_files import BEST_MODEL, model_of_step

    if step is not None:
        if step != "best" and not step.isdecimal():
            raise typer.BadParameter(f"expected the number of a step, or best, found {step}", param_hint="--step")
        path = BEST_MODEL if step == "best" else model_of_step(int(step))
    try:
        run(ApiServer(context, namespace), job, path, output, image=image, print_pod=print_pod)
    except RunError as error:
        typer.echo(f"rljob: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
