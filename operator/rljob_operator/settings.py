"""Settings of one operator process, declared once.

The command line, the environment variables, `docs/operator.md` and the chart's values are derived from this model: its
defaults, its bounds and the docstrings of its fields. Durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from rljob_api.quantity import quantity_bytes
from rljob_memory.allocator import allocator_environment


class Group(StrEnum):
    """Group of options in `rljob-operator run --help` and in the manual."""

    PODS = "Pods of jobs"
    SCOPE = "Namespaces and nodes"
    TIMES = "Timeouts and intervals"
    PROCESS = "Operator process"


def _split(given: Any) -> Any:
    """Values of a list; in an environment variable they are separated by spaces or commas."""
    return re.split(r"[\s,]+", given.strip()) if isinstance(given, str) else given


def _parse_labels(given: Any) -> Any:
    """Labels from a mapping, or from texts `NAME=VALUE`."""
    if isinstance(given, dict):
        return given
    labels = {}
    for text in _split(given):
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"expected NAME=VALUE, found {text!r}")
        labels[name] = value
    return labels


def _parse_json_objects(given: Any) -> Any:
    """Objects from JSON texts, or from one text with a list."""
    try:
        objects = json.loads(given) if isinstance(given, str) else [json.loads(text) for text in given]
    except ValueError as error:
        raise ValueError(f"expected JSON, found {given!r}: {error}") from error
    return objects


def _supported_torch(version: str) -> str:
    allocator_environment("policy", version)  # raises ValueError for a torch that is too old
    return version


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Labels = Annotated[dict[str, str], BeforeValidator(_parse_labels)]
QuantityBytes = Annotated[int, BeforeValidator(quantity_bytes)]
JsonObjects = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_parse_json_objects)]
TorchVersion = Annotated[str, AfterValidator(_supported_torch)]
TokenDigest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Ports = Annotated[tuple[Port, ...], BeforeValidator(_split)]


class OperatorSettings(BaseModel):
    """Settings of one operator process."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    trainer_image: Annotated[str, Group.PODS]
    """Image of the pods of jobs without `spec.trainer`."""

    trainer_torch_version: Annotated[TorchVersion, Group.PODS]
    """Version of torch in the trainer image; the settings of the CUDA allocator depend on it."""

    trainer_image_pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], Group.PODS] = "IfNotPresent"
    """Pull policy of the trainer image."""

    image_pull_secrets: Annotated[Names, Group.PODS] = ()
    """Secrets, in the namespace of each job, to pull the trainer image with."""

    probe_image: Annotated[str, Group.PODS] = ""
    """Image that contains the out-of-memory probe for jobs with `spec.trainer`: the operator's own image. If empty,
    those pods run without the probe."""

    probe_image_pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], Group.PODS] = "IfNotPresent"
    """Pull policy of the probe image."""

    gpu_resources: Annotated[Names, Group.PODS, Field(min_length=1)] = ("nvidia.com/gpu",)
    """Extended resources that represent GPUs. Pods request the first one."""

    shared_memory_bytes: Annotated[QuantityBytes, Group.PODS] = 4 << 30
    """Size of `/dev/shm` in each pod, if a worker is not predicted to need more; it counts towards the pod's memory."""

    checkpoint_storage_class: Annotated[str | None, Group.PODS] = None
    """StorageClass of the PersistentVolumeClaims that the operator creates for checkpoints; it must support
    ReadWriteMany. If empty, the default StorageClass of the cluster is used."""

    checkpoint_claim_bytes: Annotated[QuantityBytes, Group.PODS] = 50 << 30
    """Size of the PersistentVolumeClaims that the operator creates for checkpoints."""

    run_as_user: Annotated[int, Group.PODS, Field(ge=0)] = 10001
    """User and group of the pods of jobs. 0: the cluster assigns them, as OpenShift does from the range of the
    namespace."""

    network_policy: Annotated[bool, Group.PODS] = True
    """Create a NetworkPolicy for each job: its pods reach each other, DNS, HTTPS and the API server, and no other pod
    reaches them."""

    network_policy_egress: Annotated[JsonObjects, Group.PODS] = ()
    """Further destinations of the pods of jobs, such as proxies and object stores: egress rules of a NetworkPolicy, in
    JSON. The variable has a JSON list of them."""

    job_metrics_token_sha256: Annotated[TokenDigest, Group.PODS] = ""
    """SHA-256, in hexadecimal, of the bearer token with which Prometheus reads the metrics of each job from its
    controller's pod. If empty, the pods serve none."""

    job_metrics_from: Annotated[JsonObjects, Group.PODS] = ()
    """Peers that may reach the metrics of jobs, in JSON, as in a NetworkPolicy. The variable has a JSON list of them.
    If empty, all peers may."""

    api_server_ports: Annotated[Ports, Group.PODS] = ()
    """Ports of the API server in NetworkPolicies. If empty, those of the Service `kubernetes` and its EndpointSlice."""

    shared_account: Annotated[bool, Group.PODS] = False
    """Use one ServiceAccount for the controllers of all jobs of a namespace, instead of one for each job, and a
    ValidatingAdmissionPolicy that lets each controller pod write only its own StepReport. Without that policy, which
    the chart creates, the jobs of a namespace could write each other's reports."""

    memory_profiles: Annotated[Literal["Disabled", "Namespace", "Cluster"], Group.PODS] = "Namespace"
    """MemoryProfiles that a job may start from: settings that held after out-of-memory failures of jobs of the same
    shape. `Namespace`: those of its namespace. `Cluster`: also those of other namespaces, whose jobs can then slow it
    down or make it fail. `Disabled`: none, and none are written."""

    pod_labels: Annotated[Labels, Group.PODS] = Field(default={})
    """Additional labels of every pod of a job."""

    namespaces: Annotated[Names, Group.SCOPE] = ()
    """Namespaces to watch; they must exist. If empty, all namespaces, including later ones, are watched."""

    diagnose_pods: Annotated[bool, Group.SCOPE] = False
    """Watch pods with the label `rljob.dev/diagnose=true`, of any workload, and report their out-of-memory failures in
    Events and in a metric."""

    watch_nodes: Annotated[bool, Group.SCOPE] = True
    """Watch nodes. If disabled, controller pods only prefer GPU-free nodes, and messages name no nodes."""

    label_nodes: Annotated[bool, Group.SCOPE, Field(validate_default=True)] = True
    """Maintain the label `rljob.dev/has-gpus` on nodes with GPUs, which keeps controller pods off them. Requires
    watched nodes and the right to patch them."""

    termination_grace_seconds: Annotated[int, Group.TIMES, Field(ge=1)] = 600
    """Termination grace period of each pod in seconds: the time to finish and commit the current step."""

    placement_timeout_seconds: Annotated[float, Group.TIMES, Field(ge=1)] = 600.0
    """Seconds that some pods of a job may wait for others that find no node, or that a quota refuses, before all are
    deleted and scheduling is retried later."""

    placement_retry_seconds: Annotated[float, Group.TIMES, Field(ge=0)] = 60.0
    """Seconds before scheduling is retried, up to half more for some jobs; doubled after each failure, up to
    tenfold."""

    start_timeout_seconds: Annotated[float, Group.TIMES, Field(ge=1)] = 1800.0
    """Seconds that scheduled pods may take to start (image, volume, Secret) before the job fails."""

    lost_node_seconds: Annotated[float, Group.TIMES, Field(ge=0)] = 300.0
    """Seconds after which a worker pod that should have terminated is removed from the API server, if the kubelet of
    its node has not reported all that time. 0: never."""

    restart_delay_seconds: Annotated[float, Group.TIMES, Field(ge=0)] = 10.0
    """Seconds before the first restart without progress; doubled after each restart, up to 300."""

    status_interval_seconds: Annotated[float, Group.TIMES, Field(ge=0)] = 10.0
    """Minimum interval, in seconds, between writes of a job's status that only report progress."""

    leader_election: Annotated[bool, Group.PROCESS] = True
    """Elect a leader among replicas using a Lease. If disabled, run a single replica."""

    lease_name: Annotated[str, Group.PROCESS] = "rljob-operator"
    """Name of the Lease."""

    lease_namespace: Annotated[str, Group.PROCESS] = ""
    """Namespace of the Lease. If empty, the operator's own namespace."""

    reconcile_workers: Annotated[int, Group.PROCESS, Field(ge=1)] = 16
    """Maximum number of jobs that are reconciled concurrently."""

    api_concurrency: Annotated[int, Group.PROCESS, Field(ge=1)] = 24
    """Maximum number of concurrent requests to the API server."""

    stale_watch_seconds: Annotated[float, Group.PROCESS, Field(ge=1)] = 150.0
    """Seconds without any message on a watch after which `/healthz` fails, if other watches receive messages. If none
    does, the API server is away: `/readyz` fails, and `/healthz` after ten times as long. Bookmarks arrive about once a
    minute."""

    probes_port: Annotated[Port, Group.PROCESS] = 8081
    """Port of `/healthz` and `/readyz`."""

    metrics_port: Annotated[int, Group.PROCESS, Field(ge=0, le=65535)] = 8080
    """Port of `/metrics`; 0 disables it."""

    metrics_auth: Annotated[bool, Group.PROCESS] = True
    """Serve `/metrics` only to callers that the API server authorizes to `get` it. Disable it only if a service mesh
    protects the port."""

    metrics_tls: Annotated[bool, Group.PROCESS] = True
    """Serve `/metrics` over TLS only. Disable it only if a service mesh protects the port."""

    metrics_certificate: Annotated[str, Group.PROCESS] = ""
    """Directory with `tls.crt` and `tls.key` for the metrics, such as a mounted Secret of cert-manager; they are loaded
    again when they change. If empty, a self-signed certificate is made at start-up by the program openssl."""

    admission_port: Annotated[Port, Group.PROCESS] = 9443
    """Port of the admission webhook, which any replica serves at `/validate`."""

    admission_certificate: Annotated[str, Group.PROCESS] = ""
    """Directory with `tls.crt` and `tls.key` for the admission webhook; they are loaded again when they change. If
    empty, no webhook is served."""

    log_format: Annotated[Literal["json", "text"], Group.PROCESS] = "json"
    """Log format: `json` for log collectors, `text` for people."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Group.PROCESS] = "info"
    """Minimum log level."""

    @property
    def installation(self) -> str:
        """Name of this installation of the operator, the same for all its replicas."""
        return f"{self.lease_namespace}/{self.lease_name}"

    @field_validator("checkpoint_storage_class")
    @classmethod
    def _empty_is_default(cls, storage_class: str | None) -> str | None:
        return storage_class or None

    @field_validator("label_nodes")
    @classmethod
    def _only_watched_nodes_are_labelled(cls, label_nodes: bool, info: ValidationInfo) -> bool:
        return label_nodes and info.data.get("watch_nodes", True)
