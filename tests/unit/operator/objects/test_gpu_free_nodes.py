"""Node affinity of the controller, with and without affinity of the user's."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.objects.placement import GPU_FREE_NODE_EXPRESSIONS
from tests.unit.operator.objects.builders import Object, job, objects, pod_of

GPU_NODES = [
    {"rljob.dev/has-gpus": "true"},
    {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-H200"},
    {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    {"eks.amazonaws.com/instance-gpu-name": "h100"},
    {"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"},
    {"karpenter.k8s.aws/instance-gpu-name": "h100", "karpenter.k8s.aws/instance-gpu-count": "8"},
    {"kubernetes.azure.com/accelerator": "nvidia"},
    {"karpenter.azure.com/sku-gpu-name": "A100"},
]
NODES_THAT_ONLY_SEEM_TO_HAVE_GPUS = [{"nvidia.com/gpu.present": "false"}, {"karpenter.azure.com/sku-gpu-count": "0"}]


def controller_spec(placement: str, **template_spec: Any) -> Object:
    built = objects(job(controller={"template": {"spec": template_spec}}), controller_placement=placement)
    spec: Object = pod_of(built, "controller")["spec"]
    return spec


def requires(*expressions: Object) -> Object:
    terms = [{"matchExpressions": [expression]} for expression in expressions]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def admits(spec: Object, node: dict[str, str]) -> bool:
    """Evaluate the required node affinity like the scheduler: any term, all expressions of a term."""

    def holds(expression: Object) -> bool:
        value = node.get(expression["key"])
        match expression["operator"]:
            case "DoesNotExist":
                return value is None
            case "NotIn":
                return value not in expression["values"]
            case "In":
                return value in expression["values"]
        raise AssertionError(expression)

    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return any(
        all(holds(e) for e in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
        if term.get("matchExpressions")
    )


def test_the_controller_goes_to_nodes_without_gpus() -> None:
    spec = controller_spec("GpuFreeNodes")
    assert admits(spec, {"kubernetes.io/os": "linux"})
    assert not any(admits(spec, node) for node in GPU_NODES)
    assert not any(admits(spec, {label["key"]: label.get("values", ["any"])[0]}) for label in GPU_FREE_NODE_EXPRESSIONS)
    assert all(admits(spec, node) for node in NODES_THAT_ONLY_SEEM_TO_HAVE_GPUS)
    assert "tolerations" not in spec


def test_what_the_user_requires_holds_as_well_whichever_alternative() -> None:
    zones = [{"key": "zone", "operator": "In", "values": [zone]} for zone in ("a", "b")]
    affinity = requires(*zones) | {"podAntiAffinity": {"x": []}}
    spec = controller_spec("GpuFreeNodes", affinity=affinity, nodeSelector={"pool": "cpu"})
    assert [admits(spec, {"zone": zone}) for zone in "abc"] == [True, True, False]
    assert not any(admits(spec, {"zone": "b", **node}) for node in GPU_NODES)
    assert (spec["affinity"]["podAntiAffinity"], spec["nodeSelector"]) == ({"x": []}, {"pool": "cpu"})


def test_a_term_that_matches_no_node_still_matches_none() -> None:
    affinity = requires()
    affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] = [{}]
    assert not admits(controller_spec("GpuFreeNodes", affinity=affinity), {"kubernetes.io/os": "linux"})


def test_with_gpu_nodes_only_the_controller_may_run_on_one() -> None:
    mine = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [mine]}}
    spec = controller_spec("AnyNode", affinity=affinity)
    preferred = [mine, {"weight": 100, "preference": {"matchExpressions": GPU_FREE_NODE_EXPRESSIONS}}]
    assert spec["affinity"] == {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    untainted = controller_spec("UntaintedNodes", affinity=affinity)
    assert untainted["affinity"] == spec["affinity"]
    assert "tolerations" not in untainted


@pytest.mark.parametrize("placement", ["GpuFreeNodes", "UntaintedNodes", "AnyNode"])
def test_the_users_template_is_left_as_it_was(placement: str) -> None:
    affinity = requires({"key": "zone", "operator": "In", "values": ["a"]})
    given = job(controller={"template": {"spec": {"affinity": affinity, "tolerations": [{"key": "x"}]}}})
    before = given.model_dump_json()
    objects(given, controller_placement=placement)
    assert given.model_dump_json() == before
