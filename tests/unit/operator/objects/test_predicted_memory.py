"""Host memory and disk that the pods request, from the size of the model."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.objects.predicted_memory import low_memory_limit, predicted_limit_bytes
from tests.unit.operator.objects.builders import Object, container_of, job, objects, of_kind, pod_of, volumes_of

EIGHT_B = {"uri": "hf://Qwen/Qwen3-8B"}


def memory_of(resources: Object | None = None, model: Object = EIGHT_B, **policy: Any) -> tuple[Any, Any]:
    """Request and limit of the worker."""
    if resources is not None:
        policy["template"] = {"spec": {"containers": [{"resources": resources}]}}
    found = container_of(pod_of(objects(job(model=model, policy=policy)), "policy"))["resources"]
    return found["requests"]["memory"], found.get("limits", {}).get("memory")


def test_a_worker_requests_the_prediction_and_is_limited_to_twice_that() -> None:
    assert memory_of() == ("97792Mi", "191Gi")
    eight, _ = memory_of(gpusPerReplica=8)
    assert eight == "228864Mi"


OTHER_TRAINER = {"image": "registry.example.com/trainer:1"}
LIMITED = {"template": {"spec": {"containers": [{"resources": {"limits": {"memory": "16Gi"}}}]}}}


@pytest.mark.parametrize(
    ("spec", "predicted"),
    [
        ({"model": EIGHT_B}, True),
        ({"model": EIGHT_B, "policy": LIMITED}, False),
        ({"model": EIGHT_B, "trainer": OTHER_TRAINER}, False),
        ({"model": {"uri": "hf://org/name"}}, False),
    ],
    ids=["predicted", "the user's", "another trainer", "unknown size"],
)
def test_only_a_limit_that_follows_from_the_prediction_counts_as_one(spec: Object, predicted: bool) -> None:
    found = job(**spec).spec
    assert (predicted_limit_bytes(found, "policy") is not None) is predicted
    assert predicted_limit_bytes(found, "controller") is None


def test_a_model_of_unknown_size_has_the_default_request_and_no_limit() -> None:
    assert memory_of(model={"uri": "hf://org/name"}) == ("4Gi", None)


@pytest.mark.parametrize(
    ("resources", "memory"),
    [
        ({"limits": {"memory": "16Gi"}}, ("16Gi", "16Gi")),
        ({"requests": {"memory": "300Gi"}}, ("300Gi", "300Gi")),
        ({"requests": {"memory": "16Gi"}}, ("16Gi", "191Gi")),
        ({"requests": {"memory": "4e9"}}, ("4e9", None)),
        ({"limits": {"memory": None}}, ("97792Mi", None)),
    ],
)
def test_what_the_template_sets_wins(resources: Object, memory: tuple[str, str | None]) -> None:
    assert memory_of(resources) == memory


def test_dev_shm_has_the_predicted_size_if_that_is_larger_than_the_default() -> None:
    """On a CPU, two buckets of weights are there at a time."""

    def sizes(bucket: str, **spec: Any) -> tuple[str, str]:
        usual: Object = {"model": EIGHT_B, "policy": {"gpusPerReplica": 0}, "memory": {"syncBucketSize": bucket}}
        of_job = objects(job(**(usual | spec)))
        of_role = (
            volumes_of(pod_of(of_job, role))["shm"]["emptyDir"]["sizeLimit"] for role in ("policy", "controller")
        )
        policy_size, controller_size = of_role
        return str(policy_size), str(controller_size)

    assert sizes("1Gi") == ("4Gi", "4Gi")
    assert sizes("4Gi") == ("8320Mi", "4Gi")
    assert sizes("4Gi", model={"uri": "hf://org/name"}) == ("4Gi", "4Gi"), "nothing is predicted"
    assert sizes("4Gi", policy={"gpusPerReplica": 1}) == ("4Gi", "4Gi"), "weights do not pass through it"


def test_the_claim_holds_the_checkpoints() -> None:
    def size(**spec: Any) -> str:
        claim = of_kind("PersistentVolumeClaim", objects(job(**spec)))
        return str(claim["spec"]["resources"]["requests"]["storage"])

    assert size() == "50Gi"
    assert size(model=EIGHT_B) == "329Gi"
    assert size(model=EIGHT_B, checkpoint={"size": "60Gi"}) == "60Gi"


def test_only_a_limit_of_the_users_that_is_too_low_is_reported() -> None:
    limited = {"template": {"spec": {"containers": [{"resources": {"limits": {"memory": "16Gi"}}}]}}}
    message = low_memory_limit(job(model=EIGHT_B, policy=limited).spec) or ""
    assert "expected a memory limit of at least 95." in message
    assert "found 16.00 GiB" in message
    assert low_memory_limit(job(model=EIGHT_B).spec) is None
    assert low_memory_limit(job(policy=limited).spec) is None, "the size is not known"
