"""The chart's ValidatingAdmissionPolicy on a real API server: accepted and refused jobs, messages."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.job import RLJob
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.job_objects import build_job_objects
from rljob_operator.settings import OperatorSettings
from rljob_testing.operator.api_client import ResourceClient, refusal
from rljob_testing.patience import eventually
from tests.integration.chart.conftest import CHART, RELEASE, CommandLine, Object, job

VALUES = {
    "enabled": True,
    "maxTemplateBytes": 65536,
    "maxEngineArgsBytes": 2048,
    "maxSpecBytes": 98304,
    "allowedPriorityClasses": ["research-low"],
    "allowedServiceAccounts": ["data-reader"],
    "allowedSecrets": ["hub"],
    "allowedPodLabels": ["team"],
    "allowedPodAnnotations": ["note", "prometheus.io/"],
    "allowedTolerations": ["rl"],
    "allowedRuntimeClasses": ["nvidia"],
    "allowedSchedulers": ["bin-packer"],
    "allowedCsiDrivers": ["secrets.example.com"],
    "allowedVolcanoQueues": ["research"],
    "maxTotalTemplateBytes": 131072,
}
POLICY = "ValidatingAdmissionPolicy 'rljob-system-rljob-operator-rljobs'"
RLJOBS = "/apis/rljob.dev/v1alpha1/namespaces/team-a/rljobs"
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane, command_line: CommandLine) -> Iterator[ResourceClient]:
    """An administrator, once the policy is in force."""
    api = ResourceClient.from_kubeconfig(control_plane.kubeconfig)
    command_line.helm("install", RELEASE, str(CHART), "--set-json", f"admissionPolicy={json.dumps(VALUES)}")
    control_plane.wait_established()
    eventually(lambda: policy_refuses(api, worker({"hostNetwork": True})), "the policy to be in force")
    eventually(lambda: api.find("serviceaccounts", "default", "team-a"), "the namespace to have its ServiceAccount")
    yield api
    command_line.release_jobs()
    command_line.helm("uninstall", RELEASE, "--no-hooks")
    command_line.kubectl("delete", "crd", "--all")


def dry_run(api: ResourceClient, spec: Object, **metadata: Any) -> Object:
    body = manifest(spec)
    body["metadata"] |= metadata
    return api.request("POST", RLJOBS, body, params={"dryRun": "All"})


def policy_refuses(api: ResourceClient, spec: Object) -> bool:
    """False also if the API server refuses the job for another reason, as before it serves the CRD."""
    refused = refusal(dry_run, api, spec)
    return refused is not None and POLICY in refused.message


def manifest(spec: Object) -> Object:
    body = job("sums", "team-a")
    body["spec"] |= spec
    return body


def controller(pod: Object) -> Object:
    return {"controller": {"template": {"spec": pod}}}


def worker(pod: Object) -> Object:
    return {"policy": {"template": {"spec": pod}}}


def own(**container: Any) -> Object:
    return worker({"containers": [container]})


def volume(**source: Any) -> Object:
    return worker({"volumes": [{"name": "data", **source}]})


def checkpoints(**source: Any) -> Object:
    return {"checkpoint": {"volume": source}}


def annotated(key: str, value: str) -> Object:
    return {"policy": {"template": {"metadata": {"annotations": {key: value}}}}}


def near(kind: str, **term: Any) -> Object:
    rule = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}, **term}
    rules = {
        "requiredDuringSchedulingIgnoredDuringExecution": [rule],
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": rule}],
    }
    return worker({"affinity": {kind: rules}})


def claim_template(**annotations: str) -> Object:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"ephemeral": {"volumeClaimTemplate": {"metadata": {"annotations": annotations}, "spec": spec}}}


RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SIDECAR = {"name": "logs", "image": "fluent-bit", "restartPolicy": "Always", "securityContext": RESTRICTED}


def labelled(**labels: str) -> Object:
    return {"policy": {"template": {"metadata": {"labels": labels}}}}


def secret_variable(secret: str) -> Object:
    return {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}


def deep(levels: int) -> Object:
    inner: Object = {}
    for _ in range(levels):
        inner = {"nested" * 15: inner}
    return inner


ACCEPTED: list[Object] = [
    {},
    worker({"nodeSelector": {"pool": "h200"}, "tolerations": [{"key": "rl", "operator": "Exists"}]}),
    worker({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}),
    near("podAntiAffinity"),
    worker({"affinity": {"podAffinity": {}, "nodeAffinity": {}}}),
    worker({"priorityClassName": "research-low", "serviceAccountName": "data-reader"}),
    worker({"runtimeClassName": "nvidia", "schedulerName": "bin-packer"}),
    annotated("prometheus.io/scrape", "true"),
    volume(csi={"driver": "secrets.example.com", "volumeAttributes": {"a": "b"}}),
    volume(**claim_template(note="x")),
    worker({"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}], "dnsConfig": {"options": [{"name": "ndots"}]}}),
    worker({"hostNetwork": False, "shareProcessNamespace": False, "hostUsers": False}),
    worker({"terminationGracePeriodSeconds": 3600}),
    own(env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]),
    {"policy": {"template": {"metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}}}}},
    own(image="registry/trainer:2", resources={"limits": {"memory": "900Gi"}}),
    own(env=[{"name": "NCCL_DEBUG", "value": "INFO"}]),
    own(env=[secret_variable("hub")]),
    own(envFrom=[{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "any"}}]),
    {"env": [secret_variable("hub")], "envFrom": [{"secretRef": {"name": "hub"}}]},
    volume(persistentVolumeClaim={"claimName": "data"}),
    worker({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}]}),
    volume(secret={"secretName": "hub"}),
    volume(projected={"sources": [{"configMap": {"name": "a"}}, {"secret": {"name": "hub"}}]}),
    worker({"initContainers": [SIDECAR]}),
    worker({"securityContext": {"runAsUser": 4711, "fsGroup": 4711, "runAsNonRoot": True}}),
    own(securityContext={"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}),
    own(livenessProbe={"httpGet": {"path": "/", "port": 80}}),
    checkpoints(persistentVolumeClaim={"claimName": "runs"}),
    {"rollout": {"engineArgs": {"enforce_eager": True, "compilation_config": {"level": 0}}}},
    {"trainer": {"image": "registry/trl:1", "command": ["python", "train.py"]}},
]

REFUSED: list[tuple[str, Object]] = [
    ("hostUsers and shareProcessNamespace are not allowed", worker({"hostNetwork": True})),
    ("spec.controller.template.spec: automountServiceAccountToken, hostIPC", controller({"hostPID": True})),
    ("hostUsers and shareProcessNamespace are not allowed", worker({"hostUsers": True})),
    ("shareProcessNamespace are not allowed", worker({"shareProcessNamespace": True})),
    ("fields that the policy allows, found nodeName; remove", worker({"nodeName": "control-plane-1"})),
    ("allows, found futureField; remove", worker({"futureField": {}})),
    ("allows, found futureField; remove", own(futureField={})),
    ("fields other than", worker({"securityContext": {"futureField": 1}})),
    ("may not be", own(securityContext={"futureField": 1})),
    ("only nvidia.com/gpu, rl are allowed", worker({"tolerations": [{"operator": "Exists"}]})),
    ("spec.controller.template.spec.tolerations: only", controller({"tolerations": [{"key": "a"}]})),
    ("runtimeClassName: only nvidia is allowed", worker({"runtimeClassName": "privileged"})),
    ("schedulerName: only bin-packer is allowed", worker({"schedulerName": "other"})),
    ("namespaceSelector are not", near("podAntiAffinity", namespaceSelector={})),
    ("namespaceSelector are not allowed", near("podAffinity", namespaces=["team-b"])),
    ("expected at most 86400 (a day)", worker({"terminationGracePeriodSeconds": 2**62})),
    ("expected at most 86400 (a day)", worker({"terminationGracePeriodSeconds": "1"})),
    (
        "only note, prometheus.io/ are allowed, and none for AppArmor",
        annotated("container.apparmor.security.beta.kubernetes.io/rljob", "unconfined"),
    ),
    ("only note, prometheus.io/ are allowed", annotated("prometheus.iota/a", "b")),
    ("of annotations of ephemeral claims, only note", volume(**claim_template(path="/"))),
    ("of inline CSI drivers, only secrets.example.com", volume(csi={"driver": "host.example.com"})),
    (
        "spec.checkpoint.volume: tokens of ServiceAccounts and pod certificates are not allowed; of inline CSI drivers",
        checkpoints(csi={"driver": "host.example.com"}),
    ),
    (
        "pod certificates are not allowed",
        volume(projected={"sources": [{"podCertificate": {"signerName": "a/b", "keyType": "ED25519"}}]}),
    ),
    ("expected variables", own(env=[{"name": "A", "valueFrom": {"newRef": {}}}])),
    ("expected variables from", own(envFrom=[{"newRef": {"name": "a"}}])),
    ("as in a PodSpec without null", {"policy": {"template": {"metadata": {"annotations": ["a"]}}}}),
    ("as in a PodSpec without null", worker({"tolerations": "all"})),
    (
        "spec.policy: expected at most 131072 bytes of template, env, envFrom and trainer, times replicas, found 1",
        {"policy": {"replicas": 1024, "template": {"spec": {"nodeSelector": {"a": "x" * 100}}}}},
    ),
    (
        "spec.policy: expected at most 131072 bytes of template, env, envFrom and trainer, times replicas, found 2",
        {"policy": {"replicas": 1024}, "env": [{"name": "A", "value": "x" * 200}]},
    ),
    ("only data-reader is allowed", worker({"serviceAccountName": "deployer"})),
    ("allows, found serviceAccount; remove", worker({"serviceAccount": "deployer"})),
    ("automountServiceAccountToken, hostIPC", worker({"automountServiceAccountToken": True})),
    (
        "tokens of ServiceAccounts and pod certificates are not allowed",
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t", "audience": "vault"}}]}),
    ),
    ("only research-low is allowed", worker({"priorityClassName": "system-node-critical"})),
    ("volumes: hostPath and other sources", volume(hostPath={"path": "/"})),
    ("volumes: hostPath and other sources", volume(nfs={"server": "s", "path": "/"})),
    ("spec.checkpoint.volume: hostPath", checkpoints(hostPath={"path": "/"})),
    ("spec.checkpoint.volume: tokens of", checkpoints(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]})),
    ("spec.checkpoint.volume: Secrets: only hub is allowed", checkpoints(secret={"secretName": "db-password"})),
    ("runAsUser: 0", worker({"securityContext": {"runAsUser": 0}})),
    ("runAsNonRoot: false", worker({"securityContext": {"runAsNonRoot": False}})),
    ("an unconfined seccomp", worker({"securityContext": {"seccompProfile": {"type": "Unconfined"}}})),
    ("an unconfined seccomp", worker({"securityContext": {"seccompProfile": None}})),
    ("sysctls) are not allowed", worker({"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}})),
    ("set seLinuxOptions", own(securityContext={"seLinuxOptions": {"type": "spc_t"}})),
    ("may not be privileged", own(securityContext={"privileged": True})),
    ("may not be privileged", own(securityContext={"allowPrivilegeEscalation": True})),
    ("add capabilities", own(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}})),
    ("add capabilities", own(securityContext={"capabilities": {"drop": []}})),
    ("add capabilities", own(securityContext={"capabilities": None})),
    ("run as root", own(securityContext={"runAsUser": 0})),
    ("procMount", own(securityContext={"procMount": "Unmasked"})),
    ("as in a PodSpec without null", worker({"securityContext": None})),
    ("as in a PodSpec without null", own(securityContext=None)),
    ("directives ($patch)", worker({"securityContext": {"$patch": "replace"}})),
    ("directives ($patch)", own(name="rljob", securityContext={"$patch": "delete"})),
    ("hostPort", own(ports=[{"containerPort": 80, "hostPort": 80}])),
    ("hostPort, and a host", own(livenessProbe={"tcpSocket": {"host": "10.0.0.1", "port": 1}})),
    ("hostPort, and a host", own(lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1", "port": 1}}})),
    ("a container of your own needs", worker({"containers": [{"name": "side", "image": "x"}]})),
    ("they could use its token", controller({"containers": [SIDECAR]})),
    ("they could use its token", controller({"initContainers": [SIDECAR]})),
    ("only hub is allowed", own(env=[secret_variable("db-password")])),
    ("only hub is allowed", own(envFrom=[{"secretRef": {"name": "db-password"}}])),
    ("only hub is allowed", volume(secret={"secretName": "db-password"})),
    ("only hub is allowed", volume(projected={"sources": [{"secret": {"name": "db-password"}}]})),
    (
        "only hub is allowed",
        volume(csi={"driver": "secrets.example.com", "nodePublishSecretRef": {"name": "db-password"}}),
    ),
    ("only hub is allowed", worker({"imagePullSecrets": [{"name": "registry"}]})),
    ("spec.env, spec.envFrom: Secrets: only", {"env": [secret_variable("db-password")]}),
    ("spec.env, spec.envFrom", {"envFrom": [{"secretRef": {"name": "db-password"}}]}),
    ("spec.policy.template.metadata.labels: only team is allowed", labelled(app="postgres")),
    (
        "spec.rollout.template.spec: automountServiceAccountToken, hostIPC, hostNetwork",
        {"topology": "Disaggregated", "rollout": {"template": {"spec": {"hostIPC": True}}}},
    ),
    ("expected at most 65536 bytes, found 70", own(env=[{"name": "A", "value": "x" * 70000}])),
    (
        "spec.rollout.engineArgs: expected at most 2048 bytes, found 30",
        {"rollout": {"engineArgs": {"hf_overrides": {"a": "x" * 3000}}}},
    ),
    ("spec: expected at most 98304 bytes, found 10", {"trainer": {"image": "x", "args": ["x" * 4000] * 25}}),
    ("expected at most 65536 bytes, found", worker(deep(800))),
    ("as in a PodSpec", worker({"containers": "privileged"})),
    ("as in a PodSpec", worker({"containers": ["privileged"]})),
    ("as in a PodSpec", worker({"volumes": [["a"]]})),
]
"""A part of the message, and the spec of a job."""


def test_the_api_servers_type_checker_finds_no_mistake_in_the_policy(
    api: ResourceClient, command_line: CommandLine
) -> None:
    def status() -> Object:
        policy = command_line.get("validatingadmissionpolicy", "rljob-system-rljob-operator-rljobs")
        return dict(policy.get("status", {}))

    eventually(lambda: "typeChecking" in status(), "the policy to be checked")
    assert status()["typeChecking"] == {}


def test_the_policy_accepts(api: ResourceClient) -> None:
    """And Pod Security `restricted` accepts the pods."""
    for spec in ACCEPTED:
        assert refusal(dry_run, api, spec) is None, spec
        for pod in pods_of(spec):
            assert refusal(create_pod, api, pod) is None, spec


def test_the_policy_refuses(api: ResourceClient) -> None:
    for message_part, spec in REFUSED:
        refused = refusal(dry_run, api, spec)
        assert refused is not None, spec
        assert POLICY in refused.message
        assert message_part in refused.message


def test_the_policy_limits_queues_and_their_priorities(api: ResourceClient) -> None:
    def refused(**metadata: Object) -> str:
        found = refusal(dry_run, api, {}, **metadata)
        return found.message if found else ""

    priority, queue = "kueue.x-k8s.io/priority-class", "scheduling.volcano.sh/queue-name"
    assert "priority-class]: only research-low is allowed" in refused(labels={priority: "prod"})
    assert not refused(labels={priority: "research-low", "a": "b"})
    assert "queue-name]: only research is allowed" in refused(annotations={queue: "prod"})
    assert not refused(annotations={queue: "research", "a": "b"})


FIELDS = {
    "PodSpec": lambda name: worker({name: {}}),
    "Container": lambda name: own(**{name: {}}),
    "Volume": lambda name: volume(**{name: {}}),
}
"""A job with the field, by the name of the type that has it."""


@pytest.mark.parametrize("kind", FIELDS)
def test_the_page_has_the_verdict_on_every_field_of_kubernetes(api: ResourceClient, kind: str) -> None:
    """The page names each field of the API server's own description once, and the policy refuses those that it says."""
    served = api.request("GET", "/openapi/v3/api/v1")["components"]["schemas"][f"io.k8s.api.core.v1.{kind}"]
    rows = [row for row in fields_table() if row[0] == kind]
    named = [name for _, names, _ in rows for name in names]
    assert sorted(named) == sorted(served["properties"])
    for _, names, verdict in rows:
        for name in names:
            refused = refusal(dry_run, api, FIELDS[kind](name))
            unknown = refused is not None and any(
                part in refused.message for part in (f"allows, found {name};", "hostPath and")
            )
            assert unknown == verdict.startswith("refused"), (name, verdict, refused)


def fields_table() -> Iterator[tuple[str, list[str], str]]:
    """Type, fields and verdict of each row of docs/security.md."""
    page = (EXAMPLES.parent / "docs" / "security.md").read_text().partition("### Fields of a template")[2]
    kinds = {"pod": "PodSpec", "container": "Container", "volume": "Volume"}
    kind = ""
    for line in page.partition("## Threat model")[0].splitlines():
        match [cell.strip() for cell in line.split("|")[1:-1]]:
            case [first, names, verdict] if "`" in names:
                kind = kinds.get(first, kind)
                yield kind, re.findall(r"`(\w+)`", names), verdict


def test_a_typical_large_template_is_cheap_enough_to_check(api: ResourceClient, command_line: CommandLine) -> None:
    """With the default limit of its size, and as many variables, volumes and mounts as a job may have in practice."""
    variables = [{"name": f"NCCL_SETTING_{i}", "value": "x" * 40} for i in range(500)]
    volumes = [{"name": f"data-{i}", "persistentVolumeClaim": {"claimName": f"data-{i}"}} for i in range(60)]
    sidecars = [{**SIDECAR, "name": f"side-{i}"} for i in range(8)]
    spec = {"containers": [{"env": variables}], "volumes": volumes, "initContainers": sidecars}
    assert refusal(dry_run, api, worker(spec)) is None


POWERS = {
    "run any image and command, including in sidecars": worker({"initContainers": [SIDECAR]}),
    "use any ServiceAccount of the namespace, and its token": worker(
        {"serviceAccountName": "default", "automountServiceAccountToken": True}
    ),
    "read any Secret of the namespace, by volume or variable": volume(secret={"secretName": "db-password"}),
    "mount any ConfigMap or claim of the namespace": volume(persistentVolumeClaim={"claimName": "any"}),
    "run as root, privileged, with capabilities, without seccomp": own(
        securityContext={"privileged": True, "runAsUser": 0, "runAsNonRoot": False}
    ),
    "use the host's network, processes, paths or ports": worker({"hostPID": True}),
    "bypass the scheduler (`nodeName`), or use another one": worker({"nodeName": "control-plane-1"}),
    "tolerate any taint": worker({"tolerations": [{"operator": "Exists"}]}),
    "use any RuntimeClass": worker({"runtimeClassName": "privileged"}),
    "keep the pods of other namespaces off nodes, by anti-affinity": near("podAntiAffinity", namespaceSelector={}),
    "share processes with injected sidecars": worker({"shareProcessNamespace": True}),
    "use any inline CSI driver": volume(csi={"driver": "host.example.com"}),
    "run without AppArmor, by annotation": annotated(
        "container.apparmor.security.beta.kubernetes.io/rljob", "unconfined"
    ),
    "carry other annotations, which can give roles, networks and sidecars": annotated(
        "iam.amazonaws.com/role", "admin"
    ),
    "take any priority class, and so preempt other pods": worker({"priorityClassName": "system-node-critical"}),
    "carry labels that Services and NetworkPolicies select": {
        "policy": {"template": {"metadata": {"labels": {"app": "postgres"}}}}
    },
}
"""A job for each row of docs/security.md."""


def test_the_table_of_powers_holds(api: ResourceClient) -> None:
    table = (EXAMPLES.parent / "docs" / "security.md").read_text().partition("| power |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    assert sorted(power for power, _, _ in rows) == sorted(POWERS)
    for power, by_pod_security, by_policy in rows:
        refused = any(refusal(create_pod, api, pod) for pod in pods_of(POWERS[power]))
        assert by_pod_security == ("refused" if refused else "allowed"), power
        assert by_policy.startswith("refused" if refusal(dry_run, api, POWERS[power]) else "allowed"), power


def test_the_policy_accepts_the_examples(api: ResourceClient) -> None:
    examples = sorted(EXAMPLES.glob("*.yaml"))
    assert examples
    for document in (found for example in examples for found in yaml.safe_load_all(example.read_text())):
        document["metadata"]["namespace"] = "team-a"
        api.request("POST", RLJOBS, document, params={"dryRun": "All"})


def test_a_job_of_before_the_policy_may_change_in_other_fields(api: ResourceClient, command_line: CommandLine) -> None:
    """Its finalizer can be taken off, or it could never be deleted."""
    binding = "validatingadmissionpolicybinding/rljob-system-rljob-operator-rljobs"
    saved = command_line.get(binding)
    command_line.kubectl("delete", binding)
    powerful = manifest(worker({"hostNetwork": True}))
    eventually(lambda: refusal(dry_run, api, powerful["spec"]) is None, "the policy to be out of force")
    api.create("rljobs", powerful | {"metadata": {"name": "older"}}, "team-a")
    command_line.apply({**saved, "metadata": {"name": saved["metadata"]["name"]}})
    eventually(lambda: policy_refuses(api, powerful["spec"]), "the policy to be in force")

    api.merge("rljobs", "older", {"metadata": {"finalizers": ["rljob.dev/pods-end-first"]}}, "team-a")
    api.merge("rljobs", "older", {"spec": {"suspend": True}}, "team-a")
    api.merge("rljobs", "older", {"metadata": {"finalizers": None}}, "team-a")
    more = copy.deepcopy(powerful["spec"]["policy"])
    more["template"]["spec"]["hostPID"] = True
    assert refusal(api.merge, "rljobs", "older", {"spec": {"policy": more}}, "team-a") is not None
    api.delete("rljobs", "older", "team-a")


def pods_of(spec: Object) -> list[Object]:
    settings = OperatorSettings(trainer_image="registry/trainer:1", trainer_torch_version="2.13.0")
    attempt = JobAttempt(
        RLJob.model_validate(manifest(spec), by_alias=True, by_name=False),
        settings,
        namespace="team-a",
        uid="5f0c1c9a-0f3c-4d55-9f3b-6f2f3a3d6f10",
        number=1,
        plan=None,
        controller_placement="GpuFreeNodes",
        gang="Native",
    )
    return list(build_job_objects(attempt, "a-token").pods)


def create_pod(api: ResourceClient, pod: Object) -> None:
    """In a dry run, without names of objects that other admission plugins look for."""
    pod = copy.deepcopy(pod)
    for field in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        pod["spec"].pop(field, None)
    api.request("POST", "/api/v1/namespaces/team-a/pods", pod, params={"dryRun": "All"})
