"""Takes the operator's finalizer off all RLJobs, once no operator is there to do it: part of an uninstall.

Without it, a job that is deleted after the operator has gone would hang for ever. Pods that run go on running.

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
from rljob_operator.labels import FINALIZER

_PASSES = 5
_CONCURRENCY = 4


async def remove_finalizers(client: ApiClient, namespaces: Sequence[str]) -> int:
    """How many jobs had it. `namespaces` empty: all. Finalizers of others stay.

    Raises ApiError where the API server refuses, or where jobs change again and again meanwhile.
    """
    removed = 0
    for _ in range(_PASSES):
        jobs = [job async for job in _jobs_with_finalizer(client, namespaces)]
        if not jobs:
            return removed
        for job in jobs:
            with suppress(NotFound, Conflict):  # gone, or changed since: the next pass sees
                await _remove_from(client, job)
                removed += 1
    raise ApiError(f"{len(jobs)} RLJobs changed again and again; end what writes to them and try again")


async def _jobs_with_finalizer(client: ApiClient, namespaces: Sequence[str]) -> AsyncIterator[Object]:
    everywhere: Sequence[str | None] = [None]
    for namespace in namespaces or everywhere:
        try:
            async for jobs, _ in client.list_pages(RLJOBS, namespace):
                for job in jobs:
                    if FINALIZER in job["metadata"].get("finalizers", ()):
                        yield job
        except NotFound:
            return  # the CRD has gone, and with it all jobs


async def _remove_from(client: ApiClient, job: Object) -> None:
    metadata = job["metadata"]
    others = [finalizer for finalizer in metadata["finalizers"] if finalizer != FINALIZER]
    patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": others}}
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
        print(f"the finalizer {FINALIZER} could not be taken off: {error}", file=sys.stderr)
        return 1
    print(f"took the finalizer {FINALIZER} off {removed} RLJobs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
