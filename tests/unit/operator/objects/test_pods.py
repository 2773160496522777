"""The pods of an attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.memory_plan import MemoryPlan
from tests.unit.operator.objects.builders import (
    CHANGE,
    DISAGGREGATED,
    NAMESPACE,
    OTHER_TRAINER,
    PLAN,
    UID,
    Object,
    container_of,
    environment_of,
    every_job,
    job,
    mounts_of,
    objects,
    of_kind,
    pod_of,
    references_of,
    settings,
    volumes_of,
)
from tests.unit.operator.objects.pod_security import restricted_violations


def test_the_controller_comes_first_and_then_the_workers_of_each_role() -> None:
    names = [pod["metadata"]["name"] for pod in objects(job(**DISAGGREGATED)).pods]
    assert names == [
        "sums-controller",
        "sums-policy-0",
        "sums-policy-1",
        "sums-rollout-0",
        "sums-rollout-1",
        "sums-rollout-2",
    ]


def test_another_trainer_has_policy_pods_alone() -> None:
    assert [pod["metadata"]["name"] for pod in objects(job(**OTHER_TRAINER)).pods] == ["sums-policy-0", "sums-policy-1"]


def test_a_pod_of_the_next_attempt_has_the_name_of_the_last_ones() -> None:
    first, second = (objects(job(), attempt=attempt).pods for attempt in (1, 2))
    assert [pod["metadata"]["name"] for pod in first] == [pod["metadata"]["name"] for pod in second]
    assert {pod["metadata"]["labels"]["rljob.dev/attempt"] for pod in second} == {"2"}


@every_job
def test_every_pod_belongs_to_the_job(spec: Object) -> None:
    for pod in objects(job(**spec), plan=PLAN).pods:
        metadata = pod["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            "RLJob",
            UID,
            True,
            True,
        )
        role = metadata["labels"]["rljob.dev/role"]
        assert metadata["namespace"] == NAMESPACE
        assert metadata["labels"] == {
            "rljob.dev/job-name": "sums",
            "rljob.dev/job-uid": UID,
            "rljob.dev/role": role,
            "rljob.dev/index": metadata["labels"]["rljob.dev/index"],
            "rljob.dev/attempt": "1",
            "rljob.dev/plan-generation": "3",
            "app.kubernetes.io/name": "rljob",
            "app.kubernetes.io/instance": "sums",
            "app.kubernetes.io/component": role,
            "app.kubernetes.io/part-of": "rljob",
            "app.kubernetes.io/managed-by": "rljob-operator",
        }


def test_installation_labels_cannot_replace_the_operators_selectors() -> None:
    with_labels = settings(pod_labels={"team": "rl", "rljob.dev/role": "none"})
    labels = pod_of(objects(job(), with_labels), "controller")["metadata"]["labels"]
    assert labels["team"] == "rl"
    assert labels["rljob.dev/role"] == "controller"


@every_job
@pytest.mark.parametrize("placement", ["GpuFreeNodes", "UntaintedNodes", "AnyNode"])
def test_every_pod_is_admitted_where_pod_security_is_restricted(spec: Object, placement: str) -> None:
    built = objects(job(**spec), controller_placement=placement)
    # An NFS volume in the pod itself is the user's choice; restricted wants a claim.
    violations = [v for pod in built.pods for v in restricted_violations(pod) if v != "volume checkpoints"]
    assert violations == []


@every_job
def test_only_the_controller_can_talk_to_the_api_server(spec: Object) -> None:
    for pod in objects(job(**spec)).pods:
        is_controller = pod["metadata"]["labels"]["rljob.dev/role"] == "controller"
        assert pod["spec"]["automountServiceAccountToken"] is is_controller
        assert pod["spec"].get("serviceAccountName") == ("sums-rljob" if is_controller else None)


@every_job
def test_a_pod_ends_with_its_container_and_gets_time_to_commit(spec: Object) -> None:
    for pod in objects(job(**spec), settings(termination_grace_seconds=77)).pods:
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["terminationGracePeriodSeconds"] == 77
        assert container_of(pod)["terminationMessagePath"] == "/dev/termination-log"


@pytest.mark.parametrize(
    ("role", "command"), [("controller", "controller"), ("policy", "worker"), ("rollout", "worker")]
)
def test_a_trainer_pod_runs_its_command_and_reports_readiness(role: str, command: str) -> None:
    container = container_of(pod_of(objects(job(**DISAGGREGATED)), role))
    assert container["image"] == "registry/rljob/trainer:1"
    assert container["command"] == ["rljob", command]
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", "/run/rljob/ready"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_what_is_written_is_written_to_volumes() -> None:
    pod = pod_of(objects(job(), settings(shared_memory_bytes=8 << 30)), "policy")
    assert {name: mount["mountPath"] for name, mount in mounts_of(pod).items()} == {
        "shm": "/dev/shm",
        "tmp": "/tmp",
        "home": "/home/rljob",
        "run": "/run/rljob",
        "job": "/etc/rljob",
        "checkpoints": "/var/lib/rljob",
    }
    volumes = volumes_of(pod)
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["job"]["configMap"]["items"] == [
        {"key": "job.yaml", "path": "job.yaml"},
        {"key": "attempt.json", "path": "attempt.json"},
    ]
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "sums-checkpoints"}


def test_each_job_on_a_shared_volume_writes_to_a_directory_of_its_own() -> None:
    volume = {"persistentVolumeClaim": {"claimName": "everyone"}}
    pod = pod_of(objects(job(checkpoint={"volume": volume})), "controller")
    assert volumes_of(pod)["checkpoints"] == {"name": "checkpoints", **volume}
    assert environment_of(pod)["RLJOB_OUTPUT"] == "/var/lib/rljob/sums"


def test_a_job_finds_its_files_in_the_claim_that_an_earlier_one_retained() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "sums-checkpoints"}}
    earlier = pod_of(objects(job(checkpoint={"retain": True})), "controller")
    later = pod_of(objects(job(checkpoint={"volume": claim})), "controller")
    assert volumes_of(earlier)["checkpoints"] == volumes_of(later)["checkpoints"]
    assert environment_of(earlier)["RLJOB_OUTPUT"] == environment_of(later)["RLJOB_OUTPUT"] == "/var/lib/rljob/sums"


@pytest.mark.parametrize(
    ("uri", "source", "sub_path"),
    [
        (
            "oci://reg:5000/models/m:1",
            {"image": {"reference": "reg:5000/models/m:1", "pullPolicy": "IfNotPresent"}},
            None,
        ),
        ("pvc://models", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, None),
        ("pvc://models/a/b/", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, "a/b"),
    ],
)
def test_a_model_in_an_image_or_a_claim_is_mounted_in_every_pod(uri: str, source: Object, sub_path: str | None) -> None:
    for pod in objects(job(model={"uri": uri})).pods:
        assert volumes_of(pod)["model"] == {"name": "model", **source}
        mount = mounts_of(pod)["model"]
        assert (mount["mountPath"], mount["readOnly"], mount.get("subPath")) == ("/var/lib/rljob-model", True, sub_path)
        assert environment_of(pod)["RLJOB_MODEL_DIR"] == "/var/lib/rljob-model"


def test_any_other_model_is_no_volume() -> None:
    pod = pod_of(objects(job(model={"uri": "hf://org/name"})), "policy")
    assert "model" not in volumes_of(pod)
    assert "RLJOB_MODEL_DIR" not in environment_of(pod)


def test_every_pod_of_a_job_knows_its_place() -> None:
    built = objects(job(**DISAGGREGATED), attempt=4)
    assert {
        name: value for name, value in environment_of(pod_of(built, "rollout", 2)).items() if name.startswith("RLJOB_")
    } == {
        "RLJOB_NAME": "sums",
        "RLJOB_NAMESPACE": NAMESPACE,
        "RLJOB_UID": UID,
        "RLJOB_ROLE": "rollout",
        "RLJOB_WORKERS": "5",
        "RLJOB_MANIFEST": "/etc/rljob/job.yaml",
        "RLJOB_OUTPUT": "/var/lib/rljob",
        "RLJOB_CACHE_DIR": "/var/lib/rljob/.model-cache",
        "RLJOB_COMPILE_CACHE_DIR": "/var/lib/rljob/.compile-cache",
        "RLJOB_RAY_HEAD": f"sums-controller.{NAMESPACE}.svc:6379",
        "RLJOB_ATTEMPT_SETTINGS": "/etc/rljob/attempt.json",
    }
    assert environment_of(pod_of(built, "controller"))["RLJOB_STEP_REPORT"] == "sums"


def test_the_settings_of_an_attempt_are_one_file_of_the_pods() -> None:
    built = objects(job(), attempt=4, plan=PLAN, plan_changes=[CHANGE])
    settings = AttemptSettings.model_validate_json(of_kind("ConfigMap", built)["data"]["attempt.json"])
    assert (settings.attempt, settings.memory_plan, settings.plan_changes) == (4, PLAN, [CHANGE])
    assert settings.allocator_environments.keys() == {"policy", "rollout"}
    assert mounts_of(pod_of(built, "policy"))["job"]["mountPath"] == "/etc/rljob"


def test_a_pod_knows_the_attempt_and_plan_that_it_was_created_for() -> None:
    """By its labels: a literal variable would make the specs of two attempts differ."""
    built, next_built = (objects(job(), attempt=attempt, plan=PLAN) for attempt in (4, 5))
    pod, next_pod = pod_of(built, "policy"), pod_of(next_built, "policy")
    fields = {
        variable: source["fieldRef"]["fieldPath"]
        for variable, source in references_of(pod).items()
        if "fieldRef" in source and variable.startswith("RLJOB_")
    }
    assert fields == {
        "RLJOB_INDEX": "metadata.labels['rljob.dev/index']",
        "RLJOB_ATTEMPT": "metadata.labels['rljob.dev/attempt']",
        "RLJOB_PLAN_GENERATION": "metadata.labels['rljob.dev/plan-generation']",
    }
    assert (pod["metadata"]["labels"]["rljob.dev/attempt"], pod["spec"]) == ("4", next_pod["spec"])
    assert pod["metadata"]["labels"]["rljob.dev/plan-generation"] == "3"


def test_another_trainer_reads_its_plan_from_its_own_pod() -> None:
    faked = {"metadata": {"annotations": {"rljob.dev/memory-plan": "{}"}}}
    pod = pod_of(objects(job(**OTHER_TRAINER | {"policy": {"template": faked}}), plan=PLAN), "policy")
    assert environment_of(pod)["RLJOB_MEMORY_PLAN_FILE"] == "/etc/rljob/memory-plan.json"
    *_, plan_file = volumes_of(pod)["job"]["projected"]["sources"]
    (item,) = plan_file["downwardAPI"]["items"]
    assert item["path"] == "memory-plan.json"
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['rljob.dev/memory-plan']"
    assert MemoryPlan.model_validate_json(pod["metadata"]["annotations"]["rljob.dev/memory-plan"]) == PLAN


@pytest.mark.parametrize("spec", [{}, DISAGGREGATED], ids=["one worker", "rollout pods"])
def test_every_pod_has_the_ray_token_from_the_secret_of_the_job(spec: Object) -> None:
    built = objects(job(**spec))
    secret = of_kind("Secret", built)
    (key,) = secret["stringData"]
    token = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": key}}
    assert [references_of(pod)["RAY_AUTH_TOKEN"] for pod in built.pods] == [token] * len(built.pods)


@pytest.mark.parametrize(("gpus", "cpu", "memory"), [(1, "1", "4Gi"), (8, "8", "32Gi")])
def test_a_worker_asks_for_its_gpus_and_tolerates_their_taint(gpus: int, cpu: str, memory: str) -> None:
    built = objects(job(policy={"gpusPerReplica": gpus}), settings(gpu_resources=("vendor.com/gpu",)))
    pod = pod_of(built, "policy")
    assert container_of(pod)["resources"] == {
        "requests": {"cpu": cpu, "memory": memory, "vendor.com/gpu": str(gpus)},
        "limits": {"vendor.com/gpu": str(gpus)},
    }
    assert pod["spec"]["tolerations"] == [{"key": "vendor.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "NVIDIA_VISIBLE_DEVICES" not in environment_of(pod)


@pytest.mark.parametrize(("spec", "role"), [({}, "controller"), ({"policy": {"gpusPerReplica": 0}}, "policy")])
def test_a_pod_without_gpus_asks_for_none_and_sees_none(spec: Object, role: str) -> None:
    pod = pod_of(objects(job(**spec)), role)
    assert "limits" not in container_of(pod)["resources"]
    assert "tolerations" not in pod["spec"]
    assert {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}.items() <= environment_of(pod).items()


def test_another_trainer_runs_as_it_is_and_finds_its_neighbours() -> None:
    built = objects(job(**OTHER_TRAINER))
    pod = pod_of(built, "policy", 1)
    container = container_of(pod)
    assert (container["image"], container["command"], container["args"]) == ("verl:1", ["torchrun"], ["train.py"])
    assert "readinessProbe" not in container
    environment = environment_of(pod)
    assert {name: value for name, value in environment.items() if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": f"sums-controller.{NAMESPACE}.svc",
        "PET_MASTER_PORT": "29500",
    }
    rank = references_of(pod)["PET_NODE_RANK"]
    assert rank == {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels['rljob.dev/index']"}}
    assert pod["metadata"]["labels"]["rljob.dev/index"] == "1"
    assert not any(name.startswith("RAY_") for name in environment.keys() | references_of(pod).keys())
    selector = of_kind("Service", built)["spec"]["selector"]
    assert selector.items() <= pod_of(built, "policy", 0)["metadata"]["labels"].items()
    assert not selector.items() <= pod["metadata"]["labels"].items()


def test_another_trainers_image_keeps_its_own_entry_point() -> None:
    container = container_of(pod_of(objects(job(trainer={"image": "verl:1"})), "policy"))
    assert container.keys().isdisjoint({"command", "args", "imagePullPolicy"})


def test_images_are_pulled_with_the_installations_secrets() -> None:
    pod = pod_of(objects(job(), settings(image_pull_secrets=("a", "b"))), "policy")
    assert pod["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


@every_job
def test_building_twice_gives_the_same_and_leaves_the_job_as_it_was(spec: dict[str, Any]) -> None:
    a_job = job(**spec)
    before = a_job.model_dump_json()
    assert objects(a_job) == objects(a_job)
    assert a_job.model_dump_json() == before


@pytest.mark.parametrize("role", ["controller", "policy"])
def test_where_nodes_know_how_the_containers_restart_in_place_by_exit_code(role: str) -> None:
    container = container_of(pod_of(objects(job(), restarts_in_place=True), role))
    assert container["restartPolicy"] == "Never"
    assert container["restartPolicyRules"] == [
        {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [86]}}
    ]
    assert "restartPolicyRules" not in container_of(pod_of(objects(job()), role))


def test_pods_of_another_attempt_differ_in_labels_alone() -> None:
    first, second = (objects(job(), attempt=number, plan=PLAN, restarts_in_place=True) for number in (1, 2))
    for before, after in zip(first.pods, second.pods, strict=True):
        assert before["spec"] == after["spec"]
        assert before["metadata"]["annotations"] == after["metadata"]["annotations"]
    changed = objects(job(), attempt=2, plan=PLAN, restarts_in_place=False)
    digests = [pod["metadata"]["annotations"]["rljob.dev/spec-digest"] for pod in (*first.pods, *changed.pods)]
    assert len(set(digests)) == len(digests)
    assert json.loads(of_kind("ConfigMap", second)["data"]["attempt.json"])["attempt"] == 2
