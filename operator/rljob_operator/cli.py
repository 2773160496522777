"""The command line: `rljob-operator run`. Every setting is an option, and an environment variable RLJOB_OPERATOR_…"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from rljob_api.quantity import quantity_bytes
from rljob_memory.allocator import allocator_environment
from rljob_operator.settings import OperatorSettings

app = typer.Typer(
    name="rljob-operator",
    help="The Kubernetes operator that reconciles RLJobs into pods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEFAULT = OperatorSettings(trainer_image="", trainer_torch_version="")

_PODS = "Pods of jobs"
_PLACES = "Where"
_TIMES = "When"
_PROCESS = "This process"


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


def _bytes(text: str | int) -> int:
    try:
        return quantity_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _torch_version(text: str) -> str:
    try:
        allocator_environment("policy", text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"expected NAME=VALUE, found {text!r}")
    return name, value


@app.callback()
def main_options() -> None:
    """The Kubernetes operator that reconciles RLJobs into pods."""


@app.command(context_settings={"auto_envvar_prefix": "RLJOB_OPERATOR"})
def run(
    # --- the pods of jobs ---
    trainer_image: Annotated[
        str, typer.Option(help="Image of the pods of jobs without spec.trainer.", rich_help_panel=_PODS)
    ],
    trainer_torch_version: Annotated[
        str,
        typer.Option(
            callback=_torch_version,
            help="Version of torch in that image; the allocator's settings follow it.",
            rich_help_panel=_PODS,
        ),
    ],
    trainer_image_pull_policy: Annotated[
        PullPolicy, typer.Option(help="When that image is pulled.", rich_help_panel=_PODS)
    ] = PullPolicy.IF_NOT_PRESENT,
    image_pull_secrets: Annotated[
        list[str] | None,
        typer.Option(help="Name of a Secret in the job's namespace to pull with; repeatable.", rich_help_panel=_PODS),
    ] = None,
    probe_image: Annotated[
        str,
        typer.Option(
            help="Image that holds the probe for jobs with spec.trainer: the operator's own. Default: no probe.",
            rich_help_panel=_PODS,
        ),
    ] = _DEFAULT.probe_image,
    gpu_resources: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Extended resource that is a GPU; repeatable, pods ask for the first. "
            f"Default: {', '.join(_DEFAULT.gpu_resources)}.",
            rich_help_panel=_PODS,
        ),
    ] = None,
    shared_memory_bytes: Annotated[
        int,
        typer.Option(parser=_bytes, metavar="QUANTITY", help="Size of /dev/shm in each pod.", rich_help_panel=_PODS),
    ] = _DEFAULT.shared_memory_bytes,
    checkpoint_storage_class: Annotated[
        str | None,
        typer.Option(help="StorageClass of the claims made for jobs. Default: the cluster's.", rich_help_panel=_PODS),
    ] = None,
    checkpoint_claim_bytes: Annotated[
        int,
        typer.Option(
            parser=_bytes, metavar="QUANTITY", help="Size of the claims made for jobs.", rich_help_panel=_PODS
        ),
    ] = _DEFAULT.checkpoint_claim_bytes,
    network_policy: Annotated[
        bool, typer.Option(help="Make a NetworkPolicy for each job.", rich_help_panel=_PODS)
    ] = _DEFAULT.network_policy,
    pod_labels: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Further label of every pod; repeatable.", rich_help_panel=_PODS),
    ] = None,
    # --- where ---
    namespaces: Annotated[
        list[str] | None,
        typer.Option(help="Namespace to look after; repeatable. Default: all.", rich_help_panel=_PLACES),
    ] = None,
    watch_nodes: Annotated[
        bool,
        typer.Option(
            help="Watch nodes. Without, controllers merely prefer nodes without GPUs.", rich_help_panel=_PLACES
        ),
    ] = _DEFAULT.watch_nodes,
    label_nodes: Annotated[
        bool, typer.Option(help="Keep the label rljob.dev/has-gpus on nodes with GPUs.", rich_help_panel=_PLACES)
    ] = _DEFAULT.label_nodes,
    # --- when; all in seconds ---
    termination_grace_seconds: Annotated[
        int, typer.Option(min=1, help="What a pod gets to commit the step it is in.", rich_help_panel=_TIMES)
    ] = _DEFAULT.termination_grace_seconds,
    placement_timeout_seconds: Annotated[
        float,
        typer.Option(
            min=1, help="How long a job may be placed in part before its pods are released.", rich_help_panel=_TIMES
        ),
    ] = _DEFAULT.placement_timeout_seconds,
    placement_retry_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Wait before such a job is tried again; doubled each time, to tenfold.", rich_help_panel=_TIMES
        ),
    ] = _DEFAULT.placement_retry_seconds,
    start_timeout_seconds: Annotated[
        float,
        typer.Option(
            min=1, help="How long placed pods may take to start before the job fails.", rich_help_panel=_TIMES
        ),
    ] = _DEFAULT.start_timeout_seconds,
    restart_delay_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Wait before a restart without progress; doubled each time, to 300.", rich_help_panel=_TIMES
        ),
    ] = _DEFAULT.restart_delay_seconds,
    status_interval_seconds: Annotated[
        float,
        typer.Option(min=0, help="Steps and rewards go to the status at most so often.", rich_help_panel=_TIMES),
    ] = _DEFAULT.status_interval_seconds,
    # --- this process ---
    leader_election: Annotated[
        bool, typer.Option(help="Agree by a Lease on the one replica that acts.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.leader_election,
    lease_name: Annotated[str, typer.Option(help="Name of the Lease.", rich_help_panel=_PROCESS)] = _DEFAULT.lease_name,
    lease_namespace: Annotated[
        str, typer.Option(help="Namespace of the Lease. Default: the operator's own.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.lease_namespace,
    reconcile_workers: Annotated[
        int, typer.Option(min=1, help="Jobs that are looked after at the same time.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.reconcile_workers,
    api_concurrency: Annotated[
        int, typer.Option(min=1, help="Requests to the API server at the same time.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.api_concurrency,
    stale_watch_seconds: Annotated[
        float, typer.Option(min=1, help="A watch silent for so long makes /healthz fail.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.stale_watch_seconds,
    probes_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of /healthz and /readyz.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.probes_port,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of /metrics; 0: none.", rich_help_panel=_PROCESS)
    ] = _DEFAULT.metrics_port,
    metrics_auth: Annotated[
        bool,
        typer.Option(
            help="Let the API server say who may read /metrics. Switch it off only where a mesh guards the port.",
            rich_help_panel=_PROCESS,
        ),
    ] = _DEFAULT.metrics_auth,
    log_format: Annotated[
        LogFormat, typer.Option(help="json for collectors, text for people.", rich_help_panel=_PROCESS)
    ] = LogFormat.JSON,
    log_level: Annotated[LogLevel, typer.Option(help="From which level on.", rich_help_panel=_PROCESS)] = LogLevel.INFO,
) -> None:
    """Look after the RLJobs of the cluster, until SIGTERM.

    \b
    The cluster: KUBECONFIG where it is set, else the pod's service account, else ~/.kube/config.

    \b
    Exit codes:
      0  stopped by a signal
      1  error; the log names it
      2  wrong option
      3  leadership lost: another replica leads
    """
    settings = OperatorSettings(
        trainer_image=trainer_image,
        trainer_torch_version=trainer_torch_version,
        trainer_image_pull_policy=trainer_image_pull_policy.value,
        image_pull_secrets=tuple(image_pull_secrets or ()),
        probe_image=probe_image,
        gpu_resources=tuple(gpu_resources or _DEFAULT.gpu_resources),
        shared_memory_bytes=shared_memory_bytes,
        checkpoint_storage_class=checkpoint_storage_class or None,
        checkpoint_claim_bytes=checkpoint_claim_bytes,
        network_policy=network_policy,
        pod_labels=dict(map(_label, pod_labels or ())),
        namespaces=tuple(namespaces or ()),
        watch_nodes=watch_nodes,
        label_nodes=label_nodes and watch_nodes,
        termination_grace_seconds=termination_grace_seconds,
        placement_timeout_seconds=placement_timeout_seconds,
        placement_retry_seconds=placement_retry_seconds,
        start_timeout_seconds=start_timeout_seconds,
        restart_delay_seconds=restart_delay_seconds,
        status_interval_seconds=status_interval_seconds,
        leader_election=leader_election,
        lease_name=lease_name,
        lease_namespace=lease_namespace,
        reconcile_workers=reconcile_workers,
        api_concurrency=api_concurrency,
        stale_watch_seconds=stale_watch_seconds,
        probes_port=probes_port,
        metrics_port=metrics_port,
        metrics_auth=metrics_auth,
    )
    raise typer.Exit(_run(settings, log_format, log_level))


def _run(settings: OperatorSettings, log_format: LogFormat, log_level: LogLevel) -> int:
    """The exit code of a replica with these settings, once it has ended."""
    import structlog

    from rljob_operator.logs import set_up_logs
    from rljob_operator.operator import run_operator
    from rljob_operator.reconcile.reconcile import reconcile

    set_up_logs(log_format.value, log_level.value)
    log = structlog.get_logger("rljob_operator")
    log.info("starting", trainer_image=settings.trainer_image, namespaces=settings.namespaces or "all")
    try:
        run_operator(settings, reconcile)
    except Exception as error:
        log.exception("the operator cannot go on", error=str(error))
        return 1
    return 0


def main() -> None:
    """Entry point of the `rljob-operator` command."""
    sys.exit(app())


if __name__ == "__main__":
    main()
