"""The `rljob` command and the Python SDK of RLJob, without torch, vLLM and Ray. The SDK is imported when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljob_client.jobs import Job, JobEnded, JobFailed, JobTimeout, RLJobClient

__all__ = ["Job", "JobEnded", "JobFailed", "JobTimeout", "RLJobClient"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rljob_client import jobs

        return getattr(jobs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
