"""The topmost owner of a pod, among the workloads that people create.

Owner references are written by the author of an object: a reference counts only if an object of that name has that uid.
"""

from __future__ import annotations

import re

from rljob_operator.diagnose.container_end import ContainerEnd, Owner, controller_of
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError
from rljob_operator.kube.resources import WORKLOAD_OWNERS, Resource

_LONGEST_CHAIN = 4
"""Pod, Job, JobSet, TrainJob; or pod, RayCluster, RayJob."""
_VERSION = re.compile(r"v[0-9]+((alpha|beta)[0-9]+)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


async def top_owner(client: ApiClient, end: ContainerEnd) -> Owner | None:
    """The topmost verified owner; None if the pod has none of a known kind."""
    top, claimed = None, end.owner
    for _ in range(_LONGEST_CHAIN):
        resource = owner_resource(claimed) if claimed else None
        if claimed is None or resource is None:
            break
        try:
            metadata = await client.get_metadata(resource, claimed.name, end.namespace)
        except ApiError:
            break
        if metadata.get("uid") != claimed.uid:
            break
        top, claimed = claimed, controller_of(metadata)
    return top


def owner_resource(owner: Owner) -> Resource | None:
    """The resource of an owner of a known kind; None if its reference is not one that the API server would accept."""
    group, _, version = owner.api_version.partition("/")
    known = WORKLOAD_OWNERS.get((group, owner.kind))
    if known is None or not _VERSION.fullmatch(version) or not _NAME.fullmatch(owner.name):
        return None
    return Resource(group, version, owner.kind, known)
