"""Effects of the memory plan on pods: host memory, /dev/shm, excluded nodes."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.objects.invalid_template import InvalidTemplate
from tests.unit.operator.objects.builders import PLAN, Object, container_of, job, objects, pod_of, volumes_of

GIB = 1 << 30


def template(limits: Object | None = None, **pod_spec: Any) -> Object:
    container: Object = {"name": "rljob", "resources": {"limits": limits}} if limits else {"name": "rljob"}
    return {"template": {"spec": {"containers": [container], **pod_spec}}}


def worker(policy: Object, **plan: Any) -> Object:
    return pod_of(objects(job(policy=policy), plan=PLAN.model_copy(update=plan)), "policy")


def test_the_plans_host_memory_is_limit_and_request_of_the_workers_alone() -> None:
    built = objects(
        job(policy=template({"memory": "8Gi", "cpu": "2"}), controller=template({"memory": "1Gi"})),
        plan=PLAN.model_copy(update={"host_memory_bytes": 12 * GIB}),
    )
    resources = container_of(pod_of(built, "policy"))["resources"]
    assert (resources["limits"]["memory"], resources["requests"]["memory"]) == ("12Gi", "12Gi")
    assert resources["limits"]["cpu"] == "2"
    assert container_of(pod_of(built, "controller"))["resources"]["limits"] == {"memory": "1Gi"}


def test_the_controller_has_a_host_memory_of_its_own_in_the_plan() -> None:
    plan = PLAN.model_copy(update={"controller_host_memory_bytes": 2 * GIB})
    built = objects(job(controller=template({"memory": "1Gi"})), plan=plan)
    assert container_of(pod_of(built, "controller"))["resources"]["limits"]["memory"] == "2Gi"


@pytest.mark.parametrize("limit", ["16Gi", "900G"])
def test_a_template_that_gives_more_host_memory_than_the_plan_keeps_it(limit: str) -> None:
    pod = worker(template({"memory": limit}), host_memory_bytes=12 * GIB)
    assert container_of(pod)["resources"]["limits"]["memory"] == limit


def test_a_worker_without_a_limit_stays_without_one() -> None:
    pod = worker({}, host_memory_bytes=12 * GIB)
    assert "memory" not in container_of(pod)["resources"].get("limits", {})


def test_dev_shm_grows_to_the_plans_size_and_never_shrinks() -> None:
    assert volumes_of(worker({}, shared_memory_bytes=8 * GIB))["shm"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert volumes_of(worker({}, shared_memory_bytes=1 * GIB))["shm"]["emptyDir"]["sizeLimit"] == "4Gi"
    unbounded = template(volumes=[{"name": "shm", "emptyDir": {"$patch": "replace", "medium": "Memory"}}])
    assert "sizeLimit" not in volumes_of(worker(unbounded, shared_memory_bytes=8 * GIB))["shm"]["emptyDir"]


def test_a_dev_shm_of_another_kind_is_left_as_it_is() -> None:
    on_host = {"name": "shm", "hostPath": {"path": "/dev/shm"}}
    assert volumes_of(worker(template(volumes=[on_host]), shared_memory_bytes=8 * GIB))["shm"] == on_host


def test_a_quantity_that_is_none_is_told_with_its_place() -> None:
    with pytest.raises(InvalidTemplate, match=r"spec\.policy\.template\.spec\.containers\[rljob\].*limits\.memory"):
        worker(template({"memory": "plenty"}), host_memory_bytes=12 * GIB)


def test_workers_keep_off_excluded_nodes_whatever_else_is_wanted_of_nodes() -> None:
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}, {}]
            }
        }
    }
    plan = PLAN.model_copy(update={"excluded_nodes": ["node-a", "node-b"]})
    built = objects(job(policy=template(affinity=affinity)), plan=plan)
    kept_off = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node-a", "node-b")]
    terms = _terms(pod_of(built, "policy"))
    assert terms == [{"matchExpressions": [{"key": "pool", "operator": "Exists"}], "matchFields": kept_off}, {}]
    assert all("matchFields" not in term for term in _terms(pod_of(built, "controller")))
    assert _terms(pod_of(objects(job(), plan=plan), "policy")) == [{"matchFields": kept_off}]


def _terms(pod: Object) -> list[Object]:
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms: list[Object] = required["nodeSelectorTerms"]
    return terms
