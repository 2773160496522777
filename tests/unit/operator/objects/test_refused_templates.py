"""Templates that are refused, or used with a warning, with the field and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.objects.strategic_merge import InvalidTemplate
from tests.unit.operator.objects.builders import PLAN, Object, environment_of, job, objects, pod_of, settings


def with_container(**fields: Any) -> Object:
    return {"spec": {"containers": [{"name": "rljob", **fields}]}}


def with_limits(**limits: Any) -> Object:
    return with_container(resources={"limits": limits})


def refusal(role: str, template: Object, **fields: Any) -> str:
    spec: Object = {role: {"template": template, **fields}}
    with pytest.raises(InvalidTemplate) as caught:
        objects(job(**spec), plan=PLAN.model_copy(update={"host_memory_bytes": 1}))
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("role", ["controller", "policy"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"metadata": {"name": "mine"}}, "metadata.name: expected labels and annotations only"),
        ({"metadata": {"labels": {"rljob.dev/role": "x"}}}, "rljob.dev/role is set by the operator; remove it"),
        ({"metadata": {"labels": {"rljob.dev/mine": "x"}}}, "rename rljob.dev/mine"),
        ({"metadata": {"labels": None}}, "rljob.dev/job-name is set by the operator"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy: cannot be set here"),
        ({"spec": {"hostname": "x"}}, "spec.hostname: cannot be set here"),
        ({"spec": {"activeDeadlineSeconds": 5}}, "write spec.activeDeadlineSeconds of the job"),
        ({"spec": {"terminationGracePeriodSeconds": 2**62}}, "expected 0 to 86400 seconds, found 4611686018427387904"),
        ({"spec": {"terminationGracePeriodSeconds": -1}}, "expected 0 to 86400 seconds, found -1"),
        ({"spec": {"terminationGracePeriodSeconds": "60"}}, "expected 0 to 86400 seconds, found '60'"),
        ({"spec": {"volumes": [{"name": "job", "emptyDir": {}}]}}, "it holds the manifest of the job"),
        ({"spec": {"volumes": [{"name": "checkpoints", "emptyDir": {}}]}}, "write spec.checkpoint.volume"),
        ({"spec": {"volumes": [{"name": "tmp", "$patch": "delete"}]}}, "the volume tmp is needed"),
        ({"spec": {"containers": "x"}}, "spec.containers: expected a list, found a value"),
        ({"spec": {"containers": [{"$patch": "replace"}, {"name": "x"}]}}, "the container rljob is needed"),
        (with_container(**{"$patch": "delete"}), "the container rljob is needed"),
        (with_container(command=["sh"]), "another image with the same command can be set"),
        (with_container(args=["-v"]), "another image with the same command can be set"),
        (with_container(terminationMessagePolicy="FallbackToLogsOnError"), "the operator reads the termination"),
        (with_container(env=[{"name": True}]), "env[0].name: expected the name of the element to merge"),
        (with_container(env=[{"name": "RLJOB_OF_MINE", "value": "9"}]), "RLJOB_OF_MINE is set by RLJob; remove it"),
        (with_container(env=[{"name": "RAY_AUTH_TOKEN", "value": "9"}]), "RAY_AUTH_TOKEN is set by RLJob"),
        (with_container(env=None), "is set by RLJob"),
        (with_container(ports=[{"containerPort": True}]), "ports[0].containerPort: expected the container"),
        (
            with_container(volumeMounts=[{"name": "mine", "mountPath": "/dev/shm"}]),
            "RLJob mounts its volume shm at /dev/shm; mount yours elsewhere, or override the volume shm in",
        ),
    ],
)
def test_what_the_operator_depends_on_cannot_be_overridden(role: str, template: Object, message: str) -> None:
    found = refusal(role, template)
    assert found.startswith(f"spec.{role}.template.")
    assert message in found


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"spec": {"serviceAccountName": "mine"}}, "the controller may patch its StepReport with it"),
        ({"spec": {"automountServiceAccountToken": False}}, "the controller reports its steps with the token"),
        (with_container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), "NVIDIA_VISIBLE_DEVICES is set by"),
        (with_limits(**{"nvidia.com/gpu": 1}), "requests nvidia.com/gpu, but the controller never"),
        (with_limits(**{"amd.com/gpu": 1}), "requests amd.com/gpu, but the controller never"),
        (
            {"spec": {"initContainers": [{"name": "x", "resources": {"requests": {"nvidia.com/mig-1g.5gb": 1}}}]}},
            "the container x requests nvidia.com/mig-1g.5gb",
        ),
        (with_container(resources={"requests": {"gpu.intel.com/i915": "1"}}), "requests gpu.intel.com/i915, but the"),
        ({"spec": {"resourceClaims": [{"name": "gpu"}]}}, "spec.resourceClaims: not supported yet"),
        ({"spec": {"affinity": {"nodeAffinity": []}}}, "affinity.nodeAffinity: expected an object, found a list"),
        ({"spec": {"affinity": "x"}}, "spec.affinity: expected an object, found a value"),
    ],
)
def test_what_the_controller_depends_on_cannot_be_overridden(template: Object, message: str) -> None:
    assert message in refusal("controller", template)


GPU = {"nvidia.com/gpu": 4}
SIDECARS: list[tuple[str, Object]] = [
    ("containers", {"resources": {"limits": GPU}}),
    ("initContainers", {"resources": {"requests": {"amd.com/gpu": "1"}}}),
    ("initContainers", {"restartPolicy": "Always", "resources": {"limits": {"x.io/gpu": 1}}}),
]


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (with_limits(**GPU), "write spec.policy.gpusPerReplica"),
        *[({"spec": {kind: [{"name": "side", **extra}]}}, "the container side requests ") for kind, extra in SIDECARS],
        *[
            (with_limits(**{kind: 1}), f"{kind} is not among the GPUs of this installation (nvidia.com/gpu)")
            for kind in ("nvidia.com/mig-1g.10gb", "amd.com/gpu", "nvidia.com/gpu.shared")
        ],
        *[
            (with_limits(**{"nvidia.com/gpu": count}), "limits")
            for count in ("²", "9" * 5000, "-1", "1.5", "one", True, 1.0, [1], {"$patch": "x"})
        ],
        (
            {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}},
            "spec.resourceClaims: not supported yet",
        ),
    ],
)
def test_gpus_are_counted_in_the_job_and_for_the_trainer_alone(gpus: int, template: Object, message: str) -> None:
    assert message in refusal("policy", template, gpusPerReplica=gpus)


def test_a_template_that_removes_the_limit_of_gpus_is_refused() -> None:
    assert "write spec.policy.gpusPerReplica" in refusal("policy", with_container(resources={"limits": None}))


CLAIM = {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1e9999999"}}}}}
DIVISOR = {"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1e9999999"}}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *[
            (
                {"containers": [{"resources": {"requests": {"memory": quantity}}}]},
                f"containers[0].resources.requests['memory']: expected a quantity such as 500m or 4Gi, found '{shown}",
            )
            for quantity, shown in [("lots", "lots'"), ("1e9999999", "1e9999999'"), ("9" * 200_000, "999")]
        ],
        (with_limits(memory="plenty")["spec"], "containers[0].resources.limits['memory']: expected a quantity"),
        ({"volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1e9999999"}}]}, "emptyDir.sizeLimit: expected a"),
        ({"volumes": [{"name": "scratch", "ephemeral": CLAIM}]}, "spec.resources.requests['storage']: expected a"),
        ({"containers": [{"env": [DIVISOR]}]}, "valueFrom.resourceFieldRef.divisor: expected a quantity"),
        (
            {"initContainers": [{"name": "a", "resources": {"limits": {"cpu": "1e999999"}}}]},
            "resources.limits['cpu']: expected a quantity",
        ),
        ({"resources": {"limits": {"cpu": "1e999999"}}}, "spec.resources.limits['cpu']: expected a quantity"),
        ({"overhead": {"cpu": "1e999999"}}, "template.spec.overhead['cpu']: expected a quantity"),
    ],
)
def test_an_invalid_quantity_is_refused_with_its_path(spec: Object, message: str) -> None:
    assert message in refusal("policy", {"spec": spec})


def test_texts_that_are_no_quantities_may_have_any_value() -> None:
    labels = {"matchLabels": {"resources": "many", "limits": "none"}}
    spread = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": labels}
    spec = {
        "nodeSelector": {"sizeLimit": "large"},
        "topologySpreadConstraints": [spread],
        "volumes": [{"name": "a", "csi": {"driver": "d", "volumeAttributes": {"sizeLimit": "none"}}}],
    }
    assert pod_of(objects(job(policy={"template": {"spec": spec}})), "policy")["spec"]["nodeSelector"]


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("value", "torch", "spec", "message"),
    [
        ("expandable_segments:true", "2.13.0", {}, "expected True or False, spelt so, found 'true'"),
        ("expandable_segment:True", "2.13.0", {}, "'expandable_segment' is not an option"),
        ("per_process_memory_fraction:0.9", "2.9.1", {}, "known since torch 2.10, and the image has torch 2.9"),
        (
            "per_process_memory_fraction:0.9",
            "2.13.0",
            {"trainer": {"image": "verl:1", "torchVersion": "2.1"}},
            "known since torch 2.10, and the image has torch 2.1",
        ),
        ("per_process_memory_fraction:0.9", "2.9.1", {"trainer": {"image": "verl:1"}}, None),
        (
            "expandable_segments:True",
            "2.13.0",
            {"memory": {"expandableSegments": "Disabled"}},
            "contradicts spec.memory.expandableSegments: Disabled",
        ),
        ("x" * 5000, "2.13.0", {}, "xxx"),
    ],
)
def test_a_doubtful_allocator_setting_is_used_and_reported(
    value: str, torch: str, spec: Object, message: str | None
) -> None:
    template = with_container(env=[{"name": ALLOCATOR, "value": value}])
    of = objects(job(policy={"template": template}, **spec), settings(trainer_torch_version=torch))
    assert environment_of(pod_of(of, "policy"))[ALLOCATOR] == value
    doubts = [note for note in of.notices if note.reason == "AllocatorSettingDoubtful"]
    assert [note.type for note in doubts] == ([] if message is None else ["Warning"])
    assert all(message in note.message for note in doubts if message)
    assert all(len(note.message) <= 1024 for note in of.notices)
