"""What an installation may choose about the operator. The command line (`cli.py`) fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Settings of one operator process. Durations are seconds, sizes are bytes."""

    trainer_image: str
    """Image of the pods of jobs without `spec.trainer`."""

    trainer_torch_version: str
    """torch in `trainer_image`: the allocator's settings depend on it."""

    trainer_image_pull_policy: str = "IfNotPresent"

    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, in each job's namespace, to pull `trainer_image` with."""

    probe_image: str = ""
    """Image that holds the probe for the pods of jobs with `spec.trainer`: the operator's own. Empty: no probe."""

    namespaces: tuple[str, ...] = ()
    """Namespaces that are looked after. Empty: all."""

    gpu_resources: tuple[str, ...] = ("nvidia.com/gpu",)
    """Extended resources that are GPUs; the first is what pods ask for."""

    watch_nodes: bool = True
    """Whether nodes are watched. Without (no right to list nodes), controllers merely prefer nodes without GPUs."""

    label_nodes: bool = True
    """Whether nodes with GPUs are labelled (needs the right to patch nodes)."""

    checkpoint_storage_class: str | None = None
    """StorageClass of the claims made for jobs. None: the cluster's default."""

    checkpoint_claim_bytes: int = 50 << 30

    shared_memory_bytes: int = 4 << 30
    """Size of /dev/shm in each pod."""

    network_policy: bool = False
    """Whether each job gets a NetworkPolicy: its pods reach each other, DNS and HTTPS, and nobody else reaches them."""

    termination_grace_seconds: int = 600
    """What a pod gets to commit the step it is in."""

    placement_timeout_seconds: float = 600.0
    """When some pods of a job are placed and others are not after so long, all are released and tried again later."""

    placement_retry_seconds: float = 60.0
    """Wait before a job that could not be placed as a whole is tried again; doubled each time, at most tenfold."""

    start_timeout_seconds: float = 1800.0
    """When pods that are placed have not all started after so long (image, volume, Secret), the job has failed."""

    restart_delay_seconds: float = 10.0
    """Wait before the first restart without progress; doubled each time, at most 300."""

    status_interval_seconds: float = 10.0
    """Steps, rewards and memory go to a job's status at most once in so long; conditions and attempts at once."""

    pod_labels: dict[str, str] = field(default_factory=dict)
    """Further labels of every pod, for the installation's own policies."""

    leader_election: bool = True
    """Whether replicas agree by a Lease on the one that acts. Without, there must be a single replica."""

    lease_name: str = "rljob-operator"

    lease_namespace: str = ""
    """Namespace of the Lease. Empty: the operator's own."""

    reconcile_workers: int = 16
    """Jobs that are looked after at the same time."""

    api_concurrency: int = 16
    """Requests to the API server at the same time."""

    stale_watch_seconds: float = 150.0
    """The operator is not healthy when a watch has been silent for so long; bookmarks come once a minute."""

    probes_port: int = 8081
    """Port of /healthz and /readyz."""

    metrics_port: int = 8080
    """Port of /metrics. 0: none."""

    metrics_auth: bool = True
    """Whether /metrics answers only those whose token may `get /metrics`, as the API server says."""
