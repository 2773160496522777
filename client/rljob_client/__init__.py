"""The `rljob` command and the Python SDK of RLJob, without torch, vLLM and Ray.

`RLJobClient` and the errors of its methods are imported when they are used, because they need pydantic and Kubernetes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljob_client.api_errors import (
        AccessDenied,
        KubernetesError,
        NoCluster,
        ObjectChanged,
        ObjectExists,
        ObjectMissing,
        ObjectRefused,
    )
    from rljob_client.jobs import Job, JobEnded, JobEvent, JobFailed, JobTimeout, RLJobClient

__all__ = [
    "AccessDenied",
    "Job",
    "JobEnded",
    "JobEvent",
    "JobFailed",
    "JobTimeout",
    "KubernetesError",
    "NoCluster",
    "ObjectChanged",
    "ObjectExists",
    "ObjectMissing",
    "ObjectRefused",
    "RLJobClient",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rljob_client import api_errors, jobs

    return getattr(jobs, name, None) or getattr(api_errors, name)
