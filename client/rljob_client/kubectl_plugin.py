"""`kubectl rljob`: jobs of a cluster by name, without the names of their pods. The functions are those of the SDK."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rljob_api.plan_change import Role
from rljob_client.errors import RunError
from rljob_client.job_view import memory_table, status_tree
from rljob_client.jobs import Job, RLJobClient

app = typer.Typer(
    name="kubectl rljob",
    help="Follow, explain and change RLJobs of a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the RLJob.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Default: that of the context.")
]
Context = Annotated[
    str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig. Default: the current one.")
]
Kubeconfig = Annotated[str | None, typer.Option(metavar="FILE", help="Default: KUBECONFIG, or ~/.kube/config.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="New file or directory.")]


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command. Its first parameter, a client or a job, becomes the options of the connection, and the name."""

    def run(namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None, **given: Any) -> None:
        client = RLJobClient(namespace, context, kubeconfig)
        function(client.get(given.pop("name")) if first.annotation is Job else client, **given)

    first, *own = inspect.signature(function, eval_str=True).parameters.values()
    connection = [*inspect.signature(run, eval_str=True).parameters.values()][:-1]
    name = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Name)
    parameters = [*([name] if first.annotation is Job else []), *own, *connection]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = function.__doc__
    app.command(function.__name__.rstrip("_"))(run)
    return function


@_command
def list_(
    client: RLJobClient,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", metavar="", help="Jobs of all namespaces.")
    ] = False,
) -> None:
    """List jobs with phase, step, reward and explanation."""
    titles = ("namespace", "name", "phase", "step", "reward", "explanation")
    table = Table(*titles[not all_namespaces :], box=None, pad_edge=False, header_style="dim")
    for job in client.list(all_namespaces=all_namespaces):
        shown = job.status.display
        progress = (shown.step, shown.reward) if shown else ("", "")
        row = (job.namespace, job.name, job.phase, *progress, escape(job.explanation))
        table.add_row(*row[not all_namespaces :])
    _console().print(table)


@_command
def status(
    job: Job,
    watch: Annotated[bool, typer.Option("--watch", "-w", metavar="", help="Show each change.")] = False,
) -> None:
    """Show a job as a tree: conditions, memory plan, latest failure, attempts, pods and GPUs."""
    console = _console()
    with Live(console=console, auto_refresh=False, transient=True) as live, suppress(KeyboardInterrupt):
        for _ in job.watch() if watch else (job,):
            if job.is_deleted:
                break
            tree = status_tree(job.name, job.spec, job.status, job.report_status(), job.pods(), datetime.now(UTC))
            if watch and console.is_terminal:
                live.update(tree, refresh=True)
            else:
                console.print(tree)
    if job.is_deleted:
        print(f"{job.name} was deleted")


@_command
def logs(
    job: Job,
    role: Annotated[Role, typer.Option(help="Role of the process.")] = "controller",
    rank: Annotated[int, typer.Option(metavar="N", min=0, help="Number of the process within its role.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", metavar="", help="Print lines as they come.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", metavar="", help="Log before the last restart in place.")
    ] = False,
) -> None:
    """Print the log of the pod that runs a process."""
    if not follow:
        print(job.logs(role, rank, previous=previous), end="")
        return
    with suppress(KeyboardInterrupt):
        for line in job.logs(role, rank, follow=True, previous=previous):
            print(line, end="", flush=True)


@_command
def top(job: Job) -> None:
    """Show the memory of each process in the last committed step, against its limits."""
    _console().print(memory_table(job.report_status()))


@_command
def suspend(job: Job) -> None:
    """Have a job save a checkpoint, and terminate its pods."""
    job.suspend()
    print(f"{job.name} is being suspended")


@_command
def resume(job: Job) -> None:
    """Resume a suspended job."""
    job.resume()
    print(f"{job.name} resumes")


@_command
def retry(job: Job) -> None:
    """Resume a failed job without another change of its spec."""
    job.retry()
    print(f"{job.name} is tried again")


@_command
def report(job: Job, output: Output = None) -> None:
    """Write the report of a run as an HTML file, by default NAME.html."""
    print(job.report(output or f"{job.name}.html"))


@_command
def model(job: Job, output: Output = None) -> None:
    """Copy the trained model of a job to this machine, by default to runs/NAME/model."""
    print(job.model(output or Path("runs", job.name, "model")))


@_command
def plan(
    client: RLJobClient,
    job: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A manifest, or the name of a job.")],
) -> None:
    """Predict the memory of a job: of a manifest like `rljob plan`, of a running job from its model and its GPUs."""
    from rljob_api.job import grown_spec
    from rljob_client.plan_command import PlanOptions, report, run_plan
    from rljob_memory.budget import setup_of
    from rljob_memory.fit import fit

    if Path(job).is_file():
        raise typer.Exit(run_plan(Path(job), PlanOptions()))
    found = client.get(job)
    reported, spec = found.report_status(), grown_spec(found.spec, found.status.plan)
    setup = setup_of(spec, reported.memory_facts if reported else None)
    if setup is not None and spec.trainer is None:
        predicted = fit(spec.memory, setup)
        print("\n".join(report(spec, predicted, predicted.explanation)))
    else:
        fits = found.condition("Fits")
        print(fits.message if fits else found.explanation)


@_command
def diagnose(
    client: RLJobClient,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a job of any kind.")],
    explain: Annotated[bool, typer.Option("--explain", metavar="", help="Also print the recognized facts.")] = False,
) -> None:
    """Explain why a job ran out of memory, from the logs and the status of its pods."""
    from rljob_client.diagnose_command import run_diagnose
    from rljob_client.pod_evidence import collect_pods

    with collect_pods(client.api, pods=(), job=name) as directories:
        raise typer.Exit(run_diagnose(directories, as_json=False, explain=explain))


def main() -> None:
    """Run the command line. A failure is one line."""
    try:
        app()
    except RunError as error:
        print(f"kubectl rljob: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def complete() -> None:
    """Print the completions of `kubectl rljob WORD…`, as kubectl expects of `kubectl_complete-rljob`."""
    *words, begun = sys.argv[1:] or [""]
    found = [] if words else [str(command.name) for command in app.registered_commands]
    with suppress(RunError):
        if words:
            found = [job.name for job in RLJobClient().list()]
    print("\n".join([*(name for name in found if name.startswith(begun)), ":4"]))  # 4: no names of files


def _console() -> Console:
    """A console that wraps lines for a terminal only."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1_000
    return console
