"""`kubectl rljob`: jobs of a cluster by name, without the names of their pods. The functions are those of the SDK."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rljob_api.plan_change import Role
from rljob_client.app import examples
from rljob_client.errors import RunError

if TYPE_CHECKING:
    from rich.console import Console

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


def main() -> None:
    """Run the command line. A failure is one line."""
    try:
        app()
    except RunError as error:
        print(f"kubectl rljob: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@app.command(epilog=examples("kubectl rljob status digits", "kubectl rljob status digits --watch"))
def status(
    name: Name,
    watch: Annotated[bool, typer.Option("--watch", "-w", metavar="", help="Show each change.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show a job as a tree: conditions, memory plan, latest failure, attempts, pods and GPUs."""
    from rich.live import Live
    from rich.tree import Tree

    from rljob_client.job_view import status_tree
    from rljob_client.jobs import Job, RLJobClient

    def tree(job: Job) -> Tree:
        return status_tree(job.name, job.spec, job.status, job.report_status(), job.pods(), datetime.now(UTC))

    client, console = RLJobClient(namespace, context, kubeconfig), _console()
    job = client.get(name)
    if not watch:
        console.print(tree(job))
        return
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        for job in client.watch(name):
            if job.is_deleted:
                break
            if console.is_terminal:
                live.update(tree(job), refresh=True)
            else:
                console.print(tree(job))
    if job.is_deleted:
        print(f"{name} was deleted")


@app.command(epilog=examples("kubectl rljob logs digits", "kubectl rljob logs digits --role policy --rank 1 -f"))
def logs(
    name: Name,
    role: Annotated[Role, typer.Option(help="Role of the process.")] = "controller",
    rank: Annotated[int, typer.Option(metavar="N", min=0, help="Number of the process within its role.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", metavar="", help="Print lines as they come.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", metavar="", help="Log before the last restart in place.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the log of the pod that runs a process."""
    from rljob_client.jobs import RLJobClient

    job = RLJobClient(namespace, context, kubeconfig).get(name)
    with suppress(KeyboardInterrupt):
        if not follow:
            sys.stdout.write(job.logs(role, rank, previous=previous))
            return
        for line in job.logs(role, rank, follow=True, previous=previous):
            print(line, end="", flush=True)


@app.command(epilog=examples("kubectl rljob plan job.yaml", "kubectl rljob plan digits"))
def plan(
    job: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A manifest, or the name of a job.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Predict the memory of a job: of a manifest like `rljob plan`, of a running job from its model and its GPUs."""
    from rljob_api.job import grown_spec
    from rljob_client.jobs import RLJobClient
    from rljob_client.plan_command import DOES_NOT_FIT, PlanOptions, report, run_plan
    from rljob_memory.budget import setup_of
    from rljob_memory.fit import fit

    if Path(job).is_file():
        raise typer.Exit(run_plan(Path(job), PlanOptions()))
    found = RLJobClient(namespace, context, kubeconfig).get(job)
    reported, spec = found.report_status(), grown_spec(found.spec, found.status.plan)
    setup = setup_of(spec, reported.memory_facts if reported else None)
    if setup is None or spec.trainer is not None:
        fits = found.condition("Fits")
        print(fits.message if fits else found.explanation)
        return
    predicted = fit(spec.memory, setup)
    print("\n".join(report(spec, predicted, predicted.explanation)))
    raise typer.Exit(DOES_NOT_FIT if predicted.lack else 0)


@app.command()
def diagnose(
    name: Name,
    explain: Annotated[bool, typer.Option("--explain", metavar="", help="Also print the recognized facts.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Explain why a job ran out of memory, from the logs and the status of its pods. Any kind of job."""
    from rljob_client.api_server import ApiServer
    from rljob_client.diagnose_command import run_diagnose
    from rljob_client.pod_evidence import collect_pods

    with collect_pods(ApiServer(context, namespace, kubeconfig), pods=(), job=name) as directories:
        raise typer.Exit(run_diagnose(directories, as_json=False, explain=explain))


@app.command()
def top(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Show the memory of each process in the last committed step, against its limits."""
    from rljob_client.job_view import memory_table
    from rljob_client.jobs import RLJobClient

    _console().print(memory_table(RLJobClient(namespace, context, kubeconfig).get(name).report_status()))


@app.command("list")
def list_jobs(
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", metavar="", help="Jobs of all namespaces.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List jobs with phase, step, reward and explanation."""
    from rich.markup import escape
    from rich.table import Table

    from rljob_client.jobs import RLJobClient

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (*(["namespace"] if all_namespaces else []), "name", "phase", "step", "reward", "explanation"):
        table.add_column(title, no_wrap=True)
    for job in RLJobClient(namespace, context, kubeconfig).list(all_namespaces=all_namespaces):
        shown = job.status.display
        row = [job.name, job.phase, shown.step if shown else "", shown.reward if shown else "", escape(job.explanation)]
        table.add_row(*([job.namespace, *row] if all_namespaces else row))
    _console().print(table)


@app.command()
def suspend(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Have a job save a checkpoint, and terminate its pods."""
    from rljob_client.jobs import RLJobClient

    RLJobClient(namespace, context, kubeconfig).get(name).suspend()
    print(f"{name} is being suspended")


@app.command()
def resume(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Resume a suspended job."""
    from rljob_client.jobs import RLJobClient

    RLJobClient(namespace, context, kubeconfig).get(name).resume()
    print(f"{name} resumes")


@app.command()
def retry(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Resume a failed job without another change of its spec."""
    from rljob_client.jobs import RLJobClient

    RLJobClient(namespace, context, kubeconfig).get(name).retry()
    print(f"{name} is tried again")


@app.command(epilog=examples("kubectl rljob report digits -o digits.html"))
def report(
    name: Name,
    output: Output = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Write the report of a run as an HTML file, by default NAME.html."""
    from rljob_client.jobs import RLJobClient

    print(RLJobClient(namespace, context, kubeconfig).get(name).report(output or f"{name}.html"))


@app.command(epilog=examples("kubectl rljob model digits -o my-model"))
def model(
    name: Name,
    output: Output = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Copy the trained model of a job to this machine, by default to runs/NAME/model."""
    from rljob_client.jobs import RLJobClient

    print(RLJobClient(namespace, context, kubeconfig).get(name).model(output or Path("runs", name, "model")))


def complete() -> None:
    """Print the completions of `kubectl rljob WORD…`, as kubectl expects of `kubectl_complete-rljob`."""
    *words, begun = sys.argv[1:] or [""]
    found = sorted(typer.main.get_group(app).commands)
    if words:
        found = []
        with suppress(RunError):
            from rljob_client.jobs import RLJobClient

            found = [job.name for job in RLJobClient().list()]
    print("\n".join([*(name for name in found if name.startswith(begun)), ":4"]))  # 4: no names of files


def _console() -> Console:
    """A console that wraps lines for a terminal only."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1_000
    return console
