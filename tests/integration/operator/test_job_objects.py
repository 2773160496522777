"""A job's objects, before a real API server: none of them is refused, and pods are merged by the keys it goes by."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.job import RLJob
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.job_objects import JobObjects, build_job_objects
from rljob_operator.objects.strategic_merge import LIST_KEYS
from rljob_operator.settings import OperatorSettings
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from tests.integration.operator.conftest import Kubectl

Object = dict[str, Any]

SETTINGS = OperatorSettings(
    trainer_image="localhost/rljob/trainer:test",
    trainer_torch_version="2.13.0",
    image_pull_secrets=("registry",),
    network_policy_egress=['{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "ports": [{"port": 3128}]}'],
    pod_labels={"team": "rl"},
)
TEMPLATE: Object = {
    "metadata": {"labels": {"env": "prod"}},
    "spec": {
        "nodeSelector": {"pool": "a"},
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["storage"]}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "volumes": [
            {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "home", "persistentVolumeClaim": {"claimName": "cache"}},
        ],
        "containers": [
            {
                "env": [{"name": "PYTORCH_ALLOC_CONF", "value": "max_split_size_mb:128"}],
                "resources": {"limits": {"memory": "2Gi"}},
            }
        ],
    },
}

JOBS: list[Object] = [
    {},
    {"checkpoint": {}},
    {"policy": {"gpusPerReplica": 0}},
    {"model": {"uri": "oci://localhost/models/m:1"}},
    {"model": {"uri": "pvc://models/qwen/3"}},
    {"model": {"uri": "hf://org/name", "cache": {"persistentVolumeClaim": "m", "path": "a/b"}}},
    {"task": {"name": "digits", "files": {"configMap": "my-task"}}},
    {"task": {"name": "digits", "files": {"persistentVolumeClaim": "data", "path": "maths/train"}}},
    {
        "env": [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
            {"name": "XDG_CACHE_HOME", "value": "/tmp/cache"},
        ],
        "envFrom": [{"secretRef": {"name": "judge"}, "prefix": "JUDGE_"}],
    },
    {"policy": {"replicas": 2, "template": TEMPLATE}, "controller": {"template": TEMPLATE}},
    {"topology": "Disaggregated", "rollout": {"replicas": 2, "template": TEMPLATE}},
    {"queueName": "gpus"},
    {"trainer": {"image": "verl:1", "command": ["torchrun"]}, "policy": {"replicas": 2}},
]


def built(stored: Object, placement: Any) -> JobObjects:
    """The objects that the operator builds from the stored job."""
    job = RLJob.model_validate(stored, by_alias=True, by_name=False)
    attempt = JobAttempt(
        job,
        SETTINGS,
        namespace=stored["metadata"]["namespace"],
        uid=stored["metadata"]["uid"],
        number=1,
        plan=None,
        controller_placement=placement,
        gang="Kueue" if job.spec.queue_name else "Native",
    )
    return build_job_objects(attempt, "token")


def test_every_object_of_a_job_is_accepted(api: ResourceClient, namespace: str, kubectl: Kubectl) -> None:
    """Also by Pod Security `restricted`, and with no field that the API server does not know."""
    placements = itertools.cycle(["GpuFreeNodes", "UntaintedNodes", "AnyNode"])
    items: dict[tuple[str, str], Object] = {}  # jobs share the objects of the account
    for number, (spec, placement) in enumerate(zip(JOBS, placements, strict=False)):
        # Suspended: an operator that other tests have started creates no objects for it.
        stored = api.create("rljobs", manifests.job(f"job-{number}", **spec, suspend=True), namespace)
        objects = built(stored, placement)
        for item in (*objects.apply, *objects.create, *objects.pods):
            items[item["kind"], item["metadata"]["name"]] = item
    assert len([kind for kind, _ in items if kind == "Pod"]) > 2 * len(JOBS)
    listed = {"apiVersion": "v1", "kind": "List", "items": list(items.values())}
    created = kubectl("create", "--validate=strict", "-f", "-", stdin=json.dumps(listed))
    assert len(created.stdout.splitlines()) == len(items)


def test_pods_are_merged_by_the_keys_of_the_api_server(kubectl: Kubectl) -> None:
    document = json.loads(kubectl("get", "--raw", "/openapi/v3/api/v1").stdout)
    schemas = document["components"]["schemas"]
    published = dict(keyed_lists(schemas, "io.k8s.api.core.v1.PodSpec"))  # but those only ever added to running pods
    assert {field.removeprefix("spec."): keys for field, keys in LIST_KEYS.items()} == published


def keyed_lists(schemas: Mapping[str, Object], name: str, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Path and keys of the keyed lists of a type, and of the containers and resources within it."""
    for field, schema in schemas[name]["properties"].items():
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys and field != "ephemeralContainers":
            yield f"{path}{field}", tuple(keys)
        below = schema.get("items", schema).get("allOf", [{}])[0].get("$ref", "").rpartition("/")[2]
        if field in ("containers", "initContainers", "resources"):
            yield from keyed_lists(schemas, below, f"{path}{field}.")
