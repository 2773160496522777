"""Removes the operator's finalizer and annotation from all RLJobs: part of an uninstall.

Otherwise jobs that are deleted after the operator would stay in deletion for ever, and an operator of another name
would leave the jobs alone. Running pods are not affected.

python -m rljob_operator.remove_finalizers [NAMESPACE …]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.connection import connect
from rljob_operator.kube.errors import ApiError, Conflict, NotFound
from rljob_operator.kube.resources import RLJOBS, Object
from rljob_operator.labels import FINALIZER, OPERATOR

_PASSES = 5
_CONCURRENCY = 4


async def remove_finalizers(client: ApiClient, namespaces: Sequence[str]) -> int:
    """Remove the finalizer and return the number of jobs that had it. All namespaces if `namespaces` is empty.

    Other finalizers stay. Raises ApiError if the API server refuses, or if jobs keep changing.
    """
    removed = 0
    for _ in range(_PASSES):
        jobs = [job async for job in _jobs_with_finalizer(client, namespaces)]
        if not jobs:
            return removed
        for job in jobs:
            with suppress(NotFound, Conflict):  # gone, or changed since: the next pass handles it
                await _remove_from(client, job)
                removed += 1
    raise ApiError(f"{len(jobs)} RLJobs kept changing; stop the clients that write to them and try again")


async def _jobs_with_finalizer(client: ApiClient, namespaces: Sequence[str]) -> AsyncIterator[Object]:
    everywhere: Sequence[str | None] = [None]
    for namespace in namespaces or everywhere:
        try:
            async for jobs, _ in client.list_pages(RLJOBS, namespace):
                for job in jobs:
                    if _is_claimed(job["metadata"]):
                        yield job
        except NotFound:
            return  # the CRD is gone, and all jobs with it


def _is_claimed(metadata: Object) -> bool:
    return FINALIZER in (metadata.get("finalizers") or ()) or OPERATOR in (metadata.get("annotations") or {})


async def _remove_from(client: ApiClient, job: Object) -> None:
    metadata = job["metadata"]
    others = [finalizer for finalizer in metadata.get("finalizers") or () if finalizer != FINALIZER]
    changed = {"finalizers": others, "annotations": {OPERATOR: None}}
    patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], **changed}}
    await client.patch(RLJOBS, metadata["name"], patch, metadata["namespace"])


async def _run(namespaces: Sequence[str]) -> int:
    client = ApiClient(connect(), concurrency=_CONCURRENCY)
    try:
        return await remove_finalizers(client, namespaces)
    finally:
        await client.close()


def main() -> int:
    try:
        removed = asyncio.run(_run(sys.argv[1:]))
    except ApiError as error:
        print(f"cannot remove the finalizer {FINALIZER}: {error}", file=sys.stderr)
        return 1
    print(f"removed the finalizer {FINALIZER} from {removed} RLJobs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
