"""Removes the operator's finalizer and annotation from RLJobs: part of an uninstall.

Otherwise jobs that are deleted after the operator would stay in deletion forever, and an operator of another name
would leave the jobs alone. Running pods are not affected.

python -m rljob_operator.remove_finalizers [--installation NAMESPACE/NAME] [NAMESPACE …]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from rljob_operator.kube.client import ApiClient, connect
from rljob_operator.kube.errors import ApiError, Conflict, NotFound
from rljob_operator.kube.resources import RLJOBS, Object
from rljob_operator.labels import FINALIZER, OPERATOR

_PASSES = 5
"""Maximum passes over all jobs: one that changes during a pass is left to the next."""
_CONCURRENCY = 4


async def remove_finalizers(client: ApiClient, namespaces: Sequence[str], installation: str = "") -> int:
    """Remove the finalizer and return the number of jobs that had it. All namespaces if `namespaces` is empty.

    Other finalizers stay, and so do jobs of another operator than `installation`, which would add them again: empty if
    there is no other. Raises ApiError if the API server refuses, or if jobs keep changing.
    """
    removed = 0
    for _ in range(_PASSES):
        jobs = [job async for job in _jobs_of(client, namespaces, installation)]
        if not jobs:
            return removed
        for job in jobs:
            with suppress(NotFound, Conflict):  # gone, or changed since: the next pass handles it
                await _remove_from(client, job)
                removed += 1
    raise ApiError(f"{len(jobs)} RLJobs kept changing; stop the clients that write to them and try again")


async def _jobs_of(client: ApiClient, namespaces: Sequence[str], installation: str) -> AsyncIterator[Object]:
    everywhere: Sequence[str | None] = [None]
    for namespace in namespaces or everywhere:
        try:
            async for jobs, _ in client.list_pages(RLJOBS, namespace):
                for job in jobs:
                    if _is_claimed(job["metadata"], installation):
                        yield job
        except NotFound:
            return  # the CRD is gone, and all jobs with it


def _is_claimed(metadata: Object, installation: str) -> bool:
    operator = (metadata.get("annotations") or {}).get(OPERATOR)
    if installation and operator not in (None, installation):
        return False
    return operator is not None or FINALIZER in (metadata.get("finalizers") or ())


async def _remove_from(client: ApiClient, job: Object) -> None:
    metadata = job["metadata"]
    others = [finalizer for finalizer in metadata.get("finalizers") or () if finalizer != FINALIZER]
    changed = {"finalizers": others, "annotations": {OPERATOR: None}}
    patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], **changed}}
    await client.patch(RLJOBS, metadata["name"], patch, metadata["namespace"])


async def _run(namespaces: Sequence[str], installation: str) -> int:
    client = ApiClient(await connect(), concurrency=_CONCURRENCY)
    try:
        return await remove_finalizers(client, namespaces, installation)
    finally:
        await client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Remove the operator's finalizer and annotation from RLJobs.")
    parser.add_argument("namespaces", nargs="*", metavar="NAMESPACE", help="default: all")
    parser.add_argument(
        "--installation", default="", help="leave jobs of other operators alone: NAMESPACE/NAME of its Lease"
    )
    arguments = parser.parse_args()
    try:
        removed = asyncio.run(_run(arguments.namespaces, arguments.installation))
    except ApiError as error:
        print(f"cannot remove the finalizer {FINALIZER}: {error}", file=sys.stderr)
        return 1
    print(f"removed the finalizer {FINALIZER} from {removed} RLJobs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
