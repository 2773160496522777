"""Additions to the pods of another trainer: the probe, and the memory plan in their environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_memory.next_plan import other_trainers_first_plan
from tests.unit.operator.objects.builders import (
    PLAN,
    Object,
    container_of,
    environment_of,
    job,
    mounts_of,
    objects,
    pod_of,
    references_of,
    settings,
    volumes_of,
)
from tests.unit.operator.objects.pod_security import restricted_violations

SITE = "/opt/rljob-probe/rljob_probe/site"
WITH_PROBE = settings(probe_image="registry/rljob/operator:1")


def other_trainers_pod(trainer: Object | None = None, **given: Any) -> Object:
    """`trainer`: beside its image. `given`: of the spec, or of `objects`."""
    of_objects = {name: given.pop(name) for name in ("plan", "with_settings") if name in given}
    spec = {"trainer": {"image": "verl:1", **(trainer or {})}, **given}
    return pod_of(objects(job(**spec), **({"with_settings": WITH_PROBE} | of_objects)), "policy")


def template(*environment: Object) -> Object:
    return {"template": {"spec": {"containers": [{"env": list(environment)}]}}}


def test_the_probe_is_copied_and_found_by_every_python() -> None:
    pod = other_trainers_pod()
    (copying,) = pod["spec"]["initContainers"]
    assert copying["image"] == "registry/rljob/operator:1"
    assert copying["resources"]["limits"] == copying["resources"]["requests"]
    volume = copying["volumeMounts"][0]["name"]
    assert volumes_of(pod)[volume]["emptyDir"] == {"sizeLimit": "10Mi"}
    assert mounts_of(pod)[volume]["readOnly"] is True
    assert environment_of(pod)["PYTHONPATH"] == SITE
    assert SITE.startswith(mounts_of(pod)[volume]["mountPath"])
    assert restricted_violations(pod) == []


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (pod_of(objects(job(), WITH_PROBE), "policy"), "RLJob's own trainer tells by itself"),
        (other_trainers_pod({"probe": "Disabled"}), "the job wants none"),
        (other_trainers_pod(with_settings=settings()), "the operator has none"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_there_is_no_probe_where_it_is_of_no_use_or_not_wanted(pod: Object, why: str) -> None:
    assert "initContainers" not in pod["spec"]
    assert "PYTHONPATH" not in environment_of(pod)


def test_the_probe_is_pulled_by_the_policy_of_the_operators_image() -> None:
    always = settings(probe_image="registry/rljob/operator:1", probe_image_pull_policy="Always")
    pod = other_trainers_pod(with_settings=always)
    assert pod["spec"]["initContainers"][0]["imagePullPolicy"] == "Always"


def test_a_path_of_the_template_comes_after_the_probes() -> None:
    pod = other_trainers_pod(policy=template({"name": "PYTHONPATH", "value": "/app:/app/lib"}))
    assert environment_of(pod)["PYTHONPATH"] == f"{SITE}:/app:/app/lib"


def test_an_empty_path_does_not_become_the_working_directory() -> None:
    pod = other_trainers_pod(policy=template({"name": "PYTHONPATH", "value": ""}))
    assert environment_of(pod)["PYTHONPATH"] == SITE


def test_a_path_from_elsewhere_is_kept_by_reference() -> None:
    reference = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    pod = other_trainers_pod(policy=template({"name": "PYTHONPATH", "valueFrom": reference}))
    assert references_of(pod)["RLJOB_TEMPLATE_PYTHONPATH"] == reference
    assert environment_of(pod)["PYTHONPATH"] == f"{SITE}:$(RLJOB_TEMPLATE_PYTHONPATH)"
    names = [entry["name"] for entry in container_of(pod)["env"]]
    assert names.index("RLJOB_TEMPLATE_PYTHONPATH") < names.index("PYTHONPATH")


def test_init_containers_of_the_template_come_after_the_probe() -> None:
    policy = {"template": {"spec": {"initContainers": [{"name": "fetch", "image": "data:1"}]}}}
    assert [c["name"] for c in other_trainers_pod(policy=policy)["spec"]["initContainers"]] == ["rljob-probe", "fetch"]


def test_the_settings_that_the_trainer_supports_are_in_its_environment() -> None:
    supported = {"supportedSettings": ["microBatchTokens", "activationCheckpointing"]}
    environment = environment_of(other_trainers_pod(supported, plan=PLAN))
    assert {name: value for name, value in environment.items() if name.startswith("RLJOB_PLAN_")} == {
        "RLJOB_PLAN_MICRO_BATCH_TOKENS": "4096",
        "RLJOB_PLAN_ACTIVATION_CHECKPOINTING": "0",
    }
    assert not any(name.startswith("RLJOB_PLAN_") for name in environment_of(other_trainers_pod(supported)))


def test_expandable_segments_come_by_torchs_own_variable_as_the_plan_says() -> None:
    classic = PLAN.model_copy(update={"expandable_segments": False})
    assert environment_of(other_trainers_pod(plan=PLAN))["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment_of(other_trainers_pod(plan=classic))
    pinned = other_trainers_pod(plan=PLAN, memory={"expandableSegments": "Disabled"})
    assert environment_of(pinned)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_an_adapter_gets_the_changes_since_the_first_plan() -> None:
    spec = job(trainer={"image": "trl:1", "adapter": "TRL"}).spec
    first = other_trainers_first_plan(spec)
    plan = first.model_copy(update={"micro_batch_tokens": first.micro_batch_tokens // 2})
    environment = environment_of(other_trainers_pod({"adapter": "TRL"}, plan=plan))
    assert environment["RLJOB_ADAPTER"] == "TRL"
    assert json.loads(environment["RLJOB_ADAPTER_CHANGES"]) == {"microBatchTokens": 0.5}


def test_without_an_adapter_its_variables_are_absent() -> None:
    assert not [name for name in environment_of(other_trainers_pod(plan=PLAN)) if name.startswith("RLJOB_ADAPTER")]
