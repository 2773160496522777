"""The user's template over RLJob's pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rljob_operator.objects.invalid_template import InvalidTemplate
from tests.unit.operator.objects.builders import (
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


def policy_pod(template: Object, **policy: Any) -> Object:
    return pod_of(objects(job(policy={"template": template, **policy})), "policy")


def controller_pod(template: Object) -> Object:
    return pod_of(objects(job(controller={"template": template})), "controller")


def with_container(**fields: Any) -> Object:
    return {"spec": {"containers": [{"name": "rljob", **fields}]}}


def test_the_ordinary_overrides_reach_the_pod() -> None:
    pod = policy_pod(
        {
            "metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}},
            "spec": {
                "nodeSelector": {"pool": "h200"},
                "priorityClassName": "high",
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "imagePullSecrets": [{"name": "mine"}],
                "runtimeClassName": "nvidia",
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                "containers": [
                    {
                        "image": "mine:2",
                        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                        "resources": {"requests": {"memory": "64Gi"}},
                    },
                    {"name": "sidecar", "image": "logs:1"},
                ],
            },
        }
    )
    spec, container = pod["spec"], container_of(pod)
    assert pod["metadata"]["labels"]["team"] == "rl"
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert (spec["nodeSelector"], spec["priorityClassName"], spec["runtimeClassName"]) == (
        {"pool": "h200"},
        "high",
        "nvidia",
    )
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["dedicated", "nvidia.com/gpu"]
    assert (container["image"], container["command"]) == ("mine:2", ["rljob", "worker"])
    assert environment_of(pod)["NCCL_DEBUG"] == "INFO"
    assert mounts_of(pod)["data"]["mountPath"] == "/data"
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "64Gi", "nvidia.com/gpu": "1"}
    assert container_of(pod, "sidecar") == {"name": "sidecar", "image": "logs:1"}


def test_every_pod_of_a_role_has_the_template_and_no_other_pod() -> None:
    spec: Object = {
        "topology": "Disaggregated",
        "policy": {"replicas": 2, "template": {"metadata": {"labels": {"of": "policy"}}}},
        "rollout": {"replicas": 2, "template": {"metadata": {"labels": {"of": "rollout"}}}},
    }
    found = [pod["metadata"]["labels"].get("of") for pod in objects(job(**spec)).pods]
    assert found == [None, "policy", "policy", "rollout", "rollout"]


@pytest.mark.parametrize(
    ("resources", "requested"),
    [
        ({"limits": {"memory": "2Gi"}}, {"cpu": "1", "memory": "2Gi"}),
        ({"limits": {"memory": "8Gi"}, "requests": {"memory": "6Gi"}}, {"cpu": "1", "memory": "6Gi"}),
        ({"requests": {"cpu": None}}, {"memory": "4Gi"}),
    ],
)
def test_a_limit_without_a_request_is_the_request(resources: Object, requested: Object) -> None:
    pod = policy_pod(with_container(resources=resources), gpusPerReplica=0)
    assert container_of(pod)["resources"]["requests"] == requested


def test_a_volume_of_rljobs_can_be_made_larger_or_moved() -> None:
    volumes = [
        {"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}},
        {"name": "home", "persistentVolumeClaim": {"claimName": "cache"}},
    ]
    found = volumes_of(policy_pod({"spec": {"volumes": volumes}}))
    assert found["shm"] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert found["home"] == {"name": "home", "persistentVolumeClaim": {"claimName": "cache"}}


def test_another_kind_of_gpu_takes_the_place_of_the_default_one() -> None:
    limits = {"nvidia.com/gpu": None, "nvidia.com/mig-3g.40gb": "1"}
    template = with_container(resources={"limits": limits, "requests": {"nvidia.com/gpu": None}})
    built = objects(
        job(policy={"template": template}), settings(gpu_resources=("nvidia.com/gpu", "nvidia.com/mig-3g.40gb"))
    )
    assert container_of(pod_of(built, "policy"))["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}


REFUSED_ANYWHERE: list[tuple[Object, str]] = [
    ({"metadata": {"name": "mine"}}, "metadata.name: expected labels and annotations only"),
    ({"metadata": {"labels": {"rljob.dev/role": "x"}}}, "rljob.dev/role is set by the operator; remove it"),
    ({"metadata": {"labels": {"rljob.dev/mine": "x"}}}, "rename rljob.dev/mine"),
    ({"metadata": {"labels": None}}, "rljob.dev/job-name is set by the operator"),
    ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy: cannot be set here"),
    ({"spec": {"hostname": "x"}}, "spec.hostname: cannot be set here"),
    ({"spec": {"terminationGracePeriodSeconds": 2**62}}, "expected 0 to 86400 seconds, found 4611686018427387904"),
    ({"spec": {"terminationGracePeriodSeconds": -1}}, "expected 0 to 86400 seconds, found -1"),
    ({"spec": {"terminationGracePeriodSeconds": "60"}}, "expected 0 to 86400 seconds, found '60'"),
    ({"spec": {"containers": [{"env": [{"name": 5, "value": "x"}]}]}}, "env[0].name: expected the name of the element"),
    ({"spec": {"containers": [{"env": [{"name": True}]}]}}, "env[0].name: expected the name of the element to merge"),
    (
        {"spec": {"containers": [{"ports": [{"containerPort": True}]}]}},
        "ports[0].containerPort: expected the container",
    ),
    ({"spec": {"activeDeadlineSeconds": 5}}, "write spec.activeDeadlineSeconds of the job"),
    ({"spec": {"volumes": [{"name": "job", "emptyDir": {}}]}}, "it holds the manifest of the job"),
    ({"spec": {"volumes": [{"name": "checkpoints", "emptyDir": {}}]}}, "write spec.checkpoint.volume"),
    ({"spec": {"volumes": [{"name": "tmp", "$patch": "delete"}]}}, "the volume tmp is needed"),
    ({"spec": {"containers": [{"name": "rljob", "$patch": "delete"}]}}, "the container rljob is needed"),
    ({"spec": {"containers": [{"$patch": "replace"}, {"name": "x"}]}}, "the container rljob is needed"),
    (with_container(command=["sh"]), "another image with the same command can be set"),
    (with_container(args=["-v"]), "another image with the same command can be set"),
    (with_container(terminationMessagePolicy="FallbackToLogsOnError"), "the operator reads the termination message"),
    (with_container(env=[{"name": "RLJOB_ATTEMPT", "value": "9"}]), "RLJOB_ATTEMPT is set by RLJob; remove it"),
    (with_container(env=[{"name": "RLJOB_OF_MINE", "value": "9"}]), "RLJOB_OF_MINE is set by RLJob; remove it"),
    (with_container(env=[{"name": "RAY_AUTH_TOKEN", "value": "9"}]), "RAY_AUTH_TOKEN is set by RLJob"),
    (with_container(env=None), "is set by RLJob"),
    (
        with_container(volumeMounts=[{"name": "mine", "mountPath": "/dev/shm"}]),
        "RLJob mounts its volume shm at /dev/shm; mount yours elsewhere, or override the volume shm in spec.volumes",
    ),
    ({"spec": {"containers": "x"}}, "spec.containers: expected a list, found a value"),
]
REFUSED_IN_THE_CONTROLLER: list[tuple[Object, str]] = [
    ({"spec": {"serviceAccountName": "mine"}}, "the controller may patch its StepReport by it"),
    ({"spec": {"automountServiceAccountToken": False}}, "the controller reports its steps with the token"),
    (with_container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), "NVIDIA_VISIBLE_DEVICES is set by"),
    (with_container(resources={"limits": {"nvidia.com/gpu": 1}}), "requests nvidia.com/gpu, but the controller never"),
    (
        {"spec": {"initContainers": [{"name": "x", "resources": {"requests": {"nvidia.com/mig-1g.5gb": 1}}}]}},
        "the container x requests nvidia.com/mig-1g.5gb",
    ),
    (with_container(resources={"limits": {"amd.com/gpu": 1}}), "requests amd.com/gpu, but the controller never"),
    (with_container(resources={"requests": {"gpu.intel.com/i915": "1"}}), "requests gpu.intel.com/i915, but the"),
    ({"spec": {"resourceClaims": [{"name": "gpu"}]}}, "spec.resourceClaims: not supported yet"),
    ({"spec": {"affinity": {"nodeAffinity": []}}}, "affinity.nodeAffinity: expected an object, found a list"),
    ({"spec": {"affinity": "x"}}, "spec.affinity: expected an object, found a value"),
]


@pytest.mark.parametrize("role", ["controller", "policy"])
@pytest.mark.parametrize(("template", "said"), REFUSED_ANYWHERE)
def test_what_the_operator_depends_on_cannot_be_overridden(role: str, template: Object, said: str) -> None:
    spec: Object = {role: {"template": template}}
    with pytest.raises(InvalidTemplate) as caught:
        objects(job(**spec))
    assert caught.value.sentence.startswith(f"spec.{role}.template.")
    assert said in caught.value.sentence


@pytest.mark.parametrize(("template", "said"), REFUSED_IN_THE_CONTROLLER)
def test_what_the_controller_depends_on_cannot_be_overridden(template: Object, said: str) -> None:
    with pytest.raises(InvalidTemplate) as caught:
        controller_pod(template)
    assert said in caught.value.sentence


def test_a_worker_may_have_a_service_account() -> None:
    pod = policy_pod({"spec": {"serviceAccountName": "reader", "automountServiceAccountToken": True}})
    assert (pod["spec"]["serviceAccountName"], pod["spec"]["automountServiceAccountToken"]) == ("reader", True)


@pytest.mark.parametrize(("gpus", "limits"), [(1, {"nvidia.com/gpu": "4"}), (0, {"nvidia.com/gpu": 1}), (1, None)])
def test_the_number_of_gpus_is_written_in_one_place(gpus: int, limits: Object | None) -> None:
    with pytest.raises(InvalidTemplate, match=r"write spec.policy.gpusPerReplica"):
        policy_pod(with_container(resources={"limits": limits}), gpusPerReplica=gpus)


@pytest.mark.parametrize(
    "extra",
    [
        {"containers": [{"name": "side", "resources": {"limits": {"nvidia.com/gpu": 4}}}]},
        {"initContainers": [{"name": "side", "resources": {"requests": {"amd.com/gpu": "1"}}}]},
        {"initContainers": [{"name": "side", "restartPolicy": "Always", "resources": {"limits": {"x.io/gpu": 1}}}]},
    ],
)
@pytest.mark.parametrize("gpus", [0, 1])
def test_only_the_trainers_container_has_gpus(extra: Object, gpus: int) -> None:
    with pytest.raises(InvalidTemplate, match=r"the container side requests .*/gpu, but only the container rljob may"):
        policy_pod({"spec": extra}, gpusPerReplica=gpus)


def test_a_sidecar_without_gpus_may_say_so() -> None:
    limits = {"nvidia.com/gpu": 0, "cpu": 1}
    policy_pod({"spec": {"containers": [{"name": "side", "resources": {"limits": limits}}]}})


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb", "amd.com/gpu", "nvidia.com/gpu.shared"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_kind_of_gpu_that_is_not_configured_is_named(resource: str, gpus: int) -> None:
    said = rf"rljob.*{resource} is not among the GPUs of this installation \(nvidia.com/gpu\); .*jobs.gpuResources"
    with pytest.raises(InvalidTemplate, match=said):
        policy_pod(with_container(resources={"limits": {resource: 1}}), gpusPerReplica=gpus)


def test_network_adapters_of_nvidia_are_no_gpus() -> None:
    policy_pod(with_container(resources={"limits": {"nvidia.com/hostdev": 1}}), gpusPerReplica=1)


@pytest.mark.parametrize("count", ["²", "9" * 5000, "-1", "1.5", "one", True, 1.0, [1], {"$patch": "x"}])
def test_a_number_of_gpus_is_a_short_number(count: Any) -> None:
    with pytest.raises(InvalidTemplate) as caught:
        policy_pod(with_container(resources={"limits": {"nvidia.com/gpu": count}}), gpusPerReplica=1)
    assert "limits" in caught.value.sentence
    assert len(caught.value.sentence) < 300


def test_claims_of_dynamic_resource_allocation_are_refused() -> None:
    claims: Object = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}
    claims["containers"] = [{"resources": {"claims": [{"name": "gpu"}]}}]
    with pytest.raises(InvalidTemplate, match=r"spec.policy.template.spec.resourceClaims: .*write gpusPerReplica"):
        policy_pod({"spec": claims}, gpusPerReplica=0)


# --- whatever the template says ---

volume_names = st.sampled_from(["shm", "tmp", "home", "run", "job", "checkpoints", "mine"])
variable_names = st.sampled_from(["RLJOB_NAME", "RAY_AUTH_TOKEN", "POD_IP", "HOME", "MINE"])
mount_paths = st.sampled_from(["/dev/shm", "/run/rljob", "/mine"])
directives = st.sampled_from(["delete", "replace"])
templates = st.fixed_dictionaries(
    {},
    optional={
        "volumes": st.lists(
            st.fixed_dictionaries({"name": volume_names}, optional={"emptyDir": st.just({}), "$patch": directives}),
            max_size=2,
        ),
        "restartPolicy": st.sampled_from([None, "Never", "Always"]),
        "containers": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "name": st.sampled_from(["rljob", "side"]),
                    "$patch": directives,
                    "env": st.lists(
                        st.fixed_dictionaries({"name": variable_names}, optional={"value": st.just("x")}), max_size=2
                    ),
                    "volumeMounts": st.lists(
                        st.fixed_dictionaries({"mountPath": mount_paths, "name": volume_names}), max_size=2
                    ),
                },
            ),
            max_size=2,
        ),
    },
)


@examples(deadline=None)
@given(templates)
def test_a_pod_never_loses_what_the_trainer_needs(spec: Object) -> None:
    plain = policy_pod({})
    try:
        pod = policy_pod({"spec": spec})
    except InvalidTemplate:
        return
    assert volumes_of(plain).keys() <= volumes_of(pod).keys()
    assert references_of(plain).items() <= references_of(pod).items()
    needed = {name: value for name, value in environment_of(plain).items() if name.startswith("RLJOB_")}
    assert needed.items() <= environment_of(pod).items()
    paths = {mount["mountPath"]: mount for mount in container_of(pod)["volumeMounts"]}
    assert all(paths[mount["mountPath"]] == mount for mount in container_of(plain)["volumeMounts"])
    assert pod["spec"]["restartPolicy"] == "Never"
