"""Files, Secrets and caches that the pods get from the spec."""

from __future__ import annotations

import pytest

from rljob_api.job import RLJob
from tests.unit.operator.objects.builders import (
    DISAGGREGATED,
    NAMESPACE,
    OTHER_TRAINER,
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


def files(**source: str) -> Object:
    return {"task": {"name": "digits", "files": source}}


def test_files_of_the_task_are_mounted_into_the_controller_alone() -> None:
    built = objects(job(**files(configMap="my-task")))
    controller, worker = pod_of(built, "controller"), pod_of(built, "policy")
    assert volumes_of(controller)["task-files"] == {"name": "task-files", "configMap": {"name": "my-task"}}
    assert mounts_of(controller)["task-files"]["readOnly"]
    assert environment_of(controller)["RLJOB_TASK_DIR"] == mounts_of(controller)["task-files"]["mountPath"]
    assert "task-files" not in volumes_of(worker)
    assert "RLJOB_TASK_DIR" not in environment_of(worker)


def test_files_on_a_claim_may_be_in_a_directory() -> None:
    controller = pod_of(objects(job(**files(persistentVolumeClaim="data", path="maths/train"))), "controller")
    assert volumes_of(controller)["task-files"]["persistentVolumeClaim"] == {"claimName": "data", "readOnly": True}
    assert mounts_of(controller)["task-files"]["subPath"] == "maths/train"


def test_every_pod_of_another_trainer_has_the_files_of_the_task() -> None:
    built = objects(job(**OTHER_TRAINER, **files(configMap="my-task")))
    assert all("task-files" in volumes_of(pod) for pod in built.pods)


def test_a_config_map_must_exist_before_pods_are_created() -> None:
    (required,) = objects(job(**files(configMap="my-task"))).require
    assert (required.name, required.namespace, required.field) == ("my-task", NAMESPACE, "spec.task.files.configMap")
    assert objects(job(**files(persistentVolumeClaim="data"))).require == ()  # the scheduler reports a missing claim


SECRETS: Object = {
    "env": [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "XDG_CACHE_HOME", "value": "/tmp/cache"},
    ],
    "envFrom": [{"secretRef": {"name": "judge"}, "prefix": "JUDGE_"}],
}


@pytest.mark.parametrize("trainer", [{}, OTHER_TRAINER])
def test_secrets_reach_every_pod_by_reference_only(trainer: Object) -> None:
    built = objects(job(**SECRETS, **trainer))
    for pod in built.pods:
        assert references_of(pod)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token", "optional": False}}
        assert container_of(pod)["envFrom"] == [{"secretRef": {"name": "judge", "optional": False}, "prefix": "JUDGE_"}]


def test_a_variable_of_the_job_overrides_a_default() -> None:
    pod = pod_of(objects(job(**SECRETS)), "policy")
    names = [entry["name"] for entry in container_of(pod)["env"]]
    assert len(names) == len(set(names))
    assert environment_of(pod)["XDG_CACHE_HOME"] == "/tmp/cache"


def test_a_template_overrides_a_variable_of_the_job() -> None:
    template = {"spec": {"containers": [{"env": [{"name": "HF_TOKEN", "value": "none"}]}]}}
    built = objects(job(**SECRETS, policy={"template": template}))
    assert environment_of(pod_of(built, "policy"))["HF_TOKEN"] == "none"
    assert "HF_TOKEN" in references_of(pod_of(built, "controller"))


def test_a_hub_model_is_kept_on_the_checkpoint_volume() -> None:
    for pod in objects(job()).pods:
        variables = environment_of(pod)
        assert variables["RLJOB_CACHE_DIR"] == "/var/lib/rljob/.model-cache"
        assert variables["HF_HUB_CACHE"].startswith(variables["RLJOB_CACHE_DIR"])
    assert "HF_HUB_CACHE" not in environment_of(pod_of(objects(job(model={"uri": "oci://r/m:1"})), "policy"))


def test_a_hub_model_can_be_kept_on_a_claim_of_its_own() -> None:
    cache = {"persistentVolumeClaim": "models", "path": "hub/a"}
    built = objects(job(model={"uri": "hf://org/name", "cache": cache}))
    for pod in built.pods:
        assert volumes_of(pod)["model-cache"]["persistentVolumeClaim"] == {"claimName": "models"}
        mount = mounts_of(pod)["model-cache"]
        assert (mount["subPath"], mount.get("readOnly")) == ("hub/a", None)
        assert environment_of(pod)["RLJOB_CACHE_DIR"] == mount["mountPath"]
    elsewhere = objects(job(model={"uri": "oci://r/m:1", "cache": cache}))
    assert "model-cache" not in volumes_of(pod_of(elsewhere, "policy"))


def compiled_code_of(of: RLJob) -> dict[str, str | None]:
    """Directory of the compiled code in the pod of each role."""
    pods = objects(of).pods
    roles = ("controller", "policy", "rollout")
    of_role = {role: pod for role in roles for pod in pods if pod["metadata"]["name"].startswith(f"sums-{role}")}
    return {role: environment_of(pod).get("RLJOB_COMPILE_CACHE_DIR") for role, pod in of_role.items()}


def test_compiled_code_is_kept_among_the_files_of_the_job() -> None:
    own = "/var/lib/rljob/.compile-cache"
    assert compiled_code_of(job()) == {"controller": None, "policy": own}
    assert compiled_code_of(job(**DISAGGREGATED)) == {"controller": None, "policy": own, "rollout": own}
    shared = {"volume": {"persistentVolumeClaim": {"claimName": "all-jobs"}}}
    assert compiled_code_of(job(checkpoint=shared))["policy"] == "/var/lib/rljob/sums/.compile-cache"


def test_jobs_share_compiled_code_only_if_they_say_so() -> None:
    model: Object = {"uri": "oci://r/m:1", "cache": {"persistentVolumeClaim": "models", "path": "a"}}
    assert compiled_code_of(job(model=model))["policy"] == "/var/lib/rljob/.compile-cache"
    model["cache"] = model["cache"] | {"compiled": True}
    assert compiled_code_of(job(model=model)) == {"controller": None, "policy": "/var/lib/rljob-cache/compiled"}
    pod = pod_of(objects(job(model=model)), "policy")
    assert volumes_of(pod)["model-cache"]["persistentVolumeClaim"] == {"claimName": "models"}
    assert mounts_of(pod)["model-cache"]["subPath"] == "a"
    assert "HF_HUB_CACHE" not in environment_of(pod)


@pytest.mark.parametrize(
    "spec",
    [
        {"policy": {"gpusPerReplica": 0}},  # nothing is compiled
        {"checkpoint": {"volume": {"emptyDir": {}}}},  # it is gone with the pod, too
        OTHER_TRAINER,
    ],
)
def test_there_is_no_directory_if_it_would_be_of_no_use(spec: Object) -> None:
    assert set(compiled_code_of(job(**spec)).values()) == {None}


def test_another_trainer_keeps_its_cache_unless_the_job_names_one() -> None:
    assert "HF_HUB_CACHE" not in environment_of(objects(job(**OTHER_TRAINER)).pods[0])
    model = {"uri": "hf://org/name", "cache": {"persistentVolumeClaim": "models"}}
    assert "HF_HUB_CACHE" in environment_of(objects(job(model=model, **OTHER_TRAINER)).pods[0])


def test_the_cluster_may_assign_the_user_of_the_pods() -> None:
    for pod in objects(job(), settings(run_as_user=0)).pods:
        context = pod["spec"]["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
        assert restricted_violations(pod) == []
