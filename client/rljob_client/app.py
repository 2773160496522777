"""The application to which `rljob_client.cli` and the trainer add their commands, and its answers to other names."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_OTHER_COMMANDS = {
    "Run rljob run MANIFEST": "train grpo",
    "Run rljob run MANIFEST; on a cluster, kubectl apply -f MANIFEST": "start",
    "Run rljob run MANIFEST, which resumes by itself; on a cluster, kubectl rljob resume JOB": "resume",
    "A manifest with policy.lora.export: Merged, the default, writes the merged model to DIR/model": "merge",
    "Run rljob export DIR --push-to-hub ORG/NAME": "push upload",
    "Run kubectl apply -f MANIFEST": "submit deploy apply create",
    "Run kubectl apply -f MANIFEST; on this machine, rljob run MANIFEST": "launch",
    "Run kubectl rljob logs JOB; of a local run, the files in DIR/logs": "logs",
    "Run kubectl rljob status JOB": "status",
    "Run kubectl rljob list": "list ps get",
    "Run kubectl describe rlj JOB (RLJob is a Kubernetes resource)": "describe",
    "Run kubectl delete rlj JOB (RLJob is a Kubernetes resource)": "delete",
    "Run kubectl rljob suspend JOB; Ctrl-C stops a local run": "stop suspend",
    "Run kubectl edit rlj JOB: recovery.maxGpus lets the policy grow": "scale",
    "Run rljob validate MANIFEST": "check lint test",
    "Run rljob fetch JOB": "download pull",
    "Run rljob diagnose LOG --explain; kubectl explain rlj.spec for the fields of a manifest": "explain",
    "Run rljob diagnose LOG": "debug",
    "Run vllm serve DIR/model: RLJob trains models and does not serve them": "serve generate",
    "Write spec.evaluation; DIR/model is in Hugging Face format, for any evaluation program": "eval evaluate",
    "Run rljob report DIR, which writes one HTML file": "plot",
    "Run helm install (the operator is installed by its chart)": "install",
    "Run rljob --version": "version",
    "Run rljob --help": "help",
}
"""Names of commands of other programs, by the answer to them."""

_TRAINER_MISSING = (
    "rljob {name}: expected the distribution rljob-trainer, found none; install it (make setup in a checkout of "
    "RLJob), or train on a cluster (kubectl apply -f MANIFEST)"
)


class _Commands(TyperGroup):
    """Commands that answer the names in `_OTHER_COMMANDS`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args and args[0] not in self.commands else ""
        if name in ("run", "export"):
            ctx.fail(_TRAINER_MISSING.format(name=name))
        for instead, names in _OTHER_COMMANDS.items():
            if name in names.split():
                ctx.fail(f"No such command '{name}'. {instead}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="rljob",
    cls=_Commands,
    help="Train language models by reinforcement learning, from RLJob manifests.",
    epilog="To run the same manifests on Kubernetes: kubectl apply -f MANIFEST",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the manifest, such as algorithm.steps=10; the value is YAML. Repeatable.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Do not print progress and notes.")]


def examples(*commands: str) -> str:
    """An epilog with one command on each line."""
    return "\n\n".join(("Examples:", *(f"  {command}" for command in commands)))


def _print_versions(wanted: bool) -> None:
    if wanted:
        from rljob_client.env_command import versions

        for package, version in versions().items():
            typer.echo(f"{package} {version}")
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
