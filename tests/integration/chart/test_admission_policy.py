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
from rljob_operator.objects.job_objects import build_job_objects
from rljob_operator.settings import OperatorSettings
from rljob_testing.operator.api_client import ApiClient, refusal
from rljob_testing.operator.eventually import eventually
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
def api(control_plane: ControlPlane, command_line: CommandLine) -> Iterator[ApiClient]:
    """An administrator, once the policy is in force."""
    api = ApiClient.from_kubeconfig(control_plane.kubeconfig)
    command_line.helm("install", RELEASE, str(CHART), "--set-json", f"admissionPolicy={json.dumps(VALUES)}")
    control_plane.wait_established()
    eventually(lambda: policy_refuses(api, worker({"hostNetwork": True})), "the policy to be in force")
    eventually(lambda: api.find("serviceaccounts", "default", "team-a"), "the namespace to have its ServiceAccount")
    yield api
    command_line.release_jobs()
    command_line.helm("uninstall", RELEASE, "--no-hooks")
    command_line.kubectl("delete", "crd", "--all")


def dry_run(api: ApiClient, spec: Object, **metadata: Any) -> Object:
    body = manifest(spec)
    body["metadata"] |= metadata
    return api.request("POST", RLJOBS, body, params={"dryRun": "All"})


def policy_refuses(api: ApiClient, spec: Object) -> bool:
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


def secret_variable(secret: str) -> Object:
    return {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}


def deep(levels: int) -> Object:
    inner: Object = {}
    for _ in range(levels):
        inner = {"nested" * 15: inner}
    return inner


ACCEPTED = {
    "no template": {},
    "placement": worker({"nodeSelector": {"pool": "h200"}, "tolerations": [{"key": "rl", "operator": "Exists"}]}),
    "the taint of GPU nodes": worker({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}),
    "affinity in the namespace": near("podAntiAffinity"),
    "no affinity": worker({"affinity": {"podAffinity": {}, "nodeAffinity": {}}}),
    "allowed names": worker({"priorityClassName": "research-low", "serviceAccountName": "data-reader"}),
    "an allowed runtime and scheduler": worker({"runtimeClassName": "nvidia", "schedulerName": "bin-packer"}),
    "an allowed annotation": annotated("prometheus.io/scrape", "true"),
    "an allowed driver": volume(csi={"driver": "secrets.example.com", "volumeAttributes": {"a": "b"}}),
    "an ephemeral claim": volume(**claim_template(note="x")),
    "a name resolution of its own": worker(
        {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}], "dnsConfig": {"options": [{"name": "ndots"}]}}
    ),
    "powers that are off": worker({"hostNetwork": False, "shareProcessNamespace": False, "hostUsers": False}),
    "a grace period": worker({"terminationGracePeriodSeconds": 3600}),
    "a variable from the pod": own(env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]),
    "an allowed label": {
        "policy": {"template": {"metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}}}}
    },
    "an image and resources": own(image="registry/trainer:2", resources={"limits": {"memory": "900Gi"}}),
    "a variable": own(env=[{"name": "NCCL_DEBUG", "value": "INFO"}]),
    "an allowed Secret": own(env=[{"name": "T", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]),
    "an allowed Secret, all of it": own(envFrom=[{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "any"}}]),
    "an allowed Secret of the job": {"env": [secret_variable("hub")], "envFrom": [{"secretRef": {"name": "hub"}}]},
    "a claim": volume(persistentVolumeClaim={"claimName": "data"}),
    "a larger /dev/shm": worker({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}]}),
    "a Secret as a volume": volume(secret={"secretName": "hub"}),
    "a projected volume": volume(projected={"sources": [{"configMap": {"name": "a"}}, {"secret": {"name": "hub"}}]}),
    "a restricted sidecar": worker({"initContainers": [SIDECAR]}),
    "another user": worker({"securityContext": {"runAsUser": 4711, "fsGroup": 4711, "runAsNonRoot": True}}),
    "a stricter context": own(securityContext={"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}),
    "a probe": own(livenessProbe={"httpGet": {"path": "/", "port": 80}}),
    "checkpoints on a claim": {"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "runs"}}}},
    "engine arguments": {"rollout": {"engineArgs": {"enforce_eager": True, "compilation_config": {"level": 0}}}},
    "another trainer": {"trainer": {"image": "registry/trl:1", "command": ["python", "train.py"]}},
}

REFUSED = {
    "hostNetwork": (worker({"hostNetwork": True}), "hostUsers and shareProcessNamespace are not allowed"),
    "hostPID": (controller({"hostPID": True}), "spec.controller.template.spec: automountServiceAccountToken, hostIPC"),
    "users of the host": (worker({"hostUsers": True}), "hostUsers and shareProcessNamespace are not allowed"),
    "shared processes": (worker({"shareProcessNamespace": True}), "shareProcessNamespace are not allowed"),
    "a node": (worker({"nodeName": "control-plane-1"}), "fields that the policy allows, found nodeName; remove"),
    "an unknown field of a pod": (worker({"futureField": {}}), "allows, found futureField; remove"),
    "an unknown field of a container": (own(futureField={}), "allows, found futureField; remove"),
    "an unknown field of a security context": (worker({"securityContext": {"futureField": 1}}), "fields other than"),
    "an unknown field of a container's security context": (own(securityContext={"futureField": 1}), "may not be"),
    "any toleration": (worker({"tolerations": [{"operator": "Exists"}]}), "only nvidia.com/gpu, rl are allowed"),
    "a runtime": (worker({"runtimeClassName": "privileged"}), "runtimeClassName: only nvidia is allowed"),
    "a scheduler": (worker({"schedulerName": "other"}), "schedulerName: only bin-packer is allowed"),
    "affinity against other namespaces": (near("podAntiAffinity", namespaceSelector={}), "namespaceSelector are not"),
    "affinity to a namespace": (near("podAffinity", namespaces=["team-b"]), "namespaceSelector are not allowed"),
    "a grace period of years": (worker({"terminationGracePeriodSeconds": 2**62}), "expected at most 86400 (a day)"),
    "no AppArmor": (
        annotated("container.apparmor.security.beta.kubernetes.io/rljob", "unconfined"),
        "only note, prometheus.io/ are allowed, and none for AppArmor",
    ),
    "the prefix without its slash": (annotated("prometheus.iota/a", "b"), "only note, prometheus.io/ are allowed"),
    "an annotation of a claim": (volume(**claim_template(path="/")), "of annotations of ephemeral claims, only note"),
    "a driver": (volume(csi={"driver": "host.example.com"}), "of inline CSI drivers, only secrets.example.com"),
    "a driver for checkpoints": (
        {"checkpoint": {"volume": {"csi": {"driver": "host.example.com"}}}},
        "spec.checkpoint.volume: tokens of ServiceAccounts and pod certificates are not allowed; of inline CSI drivers",
    ),
    "a pod certificate": (
        volume(projected={"sources": [{"podCertificate": {"signerName": "a/b", "keyType": "ED25519"}}]}),
        "pod certificates are not allowed",
    ),
    "a variable from an unknown source": (own(env=[{"name": "A", "valueFrom": {"newRef": {}}}]), "expected variables"),
    "variables from an unknown source": (own(envFrom=[{"newRef": {"name": "a"}}]), "expected variables from"),
    "a list for annotations": (
        {"policy": {"template": {"metadata": {"annotations": ["a"]}}}},
        "as in a PodSpec without null",
    ),
    "a text for tolerations": (worker({"tolerations": "all"}), "as in a PodSpec without null"),
    "large templates of many pods": (
        {"policy": {"replicas": 1024, "template": {"spec": {"nodeSelector": {"a": "x" * 100}}}}},
        "spec.policy: expected at most 131072 bytes of template, env, envFrom and trainer, times replicas, found 1",
    ),
    "long variables of many pods": (
        {"policy": {"replicas": 1024}, "env": [{"name": "A", "value": "x" * 200}]},
        "spec.policy: expected at most 131072 bytes of template, env, envFrom and trainer, times replicas, found 2",
    ),
    "a ServiceAccount": (worker({"serviceAccountName": "deployer"}), "only data-reader is allowed"),
    "a ServiceAccount by its old name": (
        worker({"serviceAccount": "deployer"}),
        "allows, found serviceAccount; remove",
    ),
    "a mounted token": (worker({"automountServiceAccountToken": True}), "automountServiceAccountToken, hostIPC"),
    "a projected token": (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t", "audience": "vault"}}]}),
        "tokens of ServiceAccounts and pod certificates are not allowed",
    ),
    "a priority class": (worker({"priorityClassName": "system-node-critical"}), "only research-low is allowed"),
    "hostPath": (volume(hostPath={"path": "/"}), "volumes: hostPath and other sources"),
    "nfs": (volume(nfs={"server": "s", "path": "/"}), "volumes: hostPath and other sources"),
    "hostPath for checkpoints": (
        {"checkpoint": {"volume": {"hostPath": {"path": "/"}}}},
        "spec.checkpoint.volume: hostPath",
    ),
    "a token for checkpoints": (
        {"checkpoint": {"volume": {"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}}},
        "spec.checkpoint.volume: tokens of ServiceAccounts",
    ),
    "a Secret for checkpoints": (
        {"checkpoint": {"volume": {"secret": {"secretName": "db-password"}}}},
        "spec.checkpoint.volume: Secrets: only hub is allowed",
    ),
    "root": (worker({"securityContext": {"runAsUser": 0}}), "runAsUser: 0"),
    "perhaps root": (worker({"securityContext": {"runAsNonRoot": False}}), "runAsNonRoot: false"),
    "no seccomp": (worker({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}), "an unconfined seccomp"),
    "removed seccomp": (worker({"securityContext": {"seccompProfile": None}}), "an unconfined seccomp"),
    "sysctls": (worker({"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}}), "sysctls) are not allowed"),
    "SELinux": (own(securityContext={"seLinuxOptions": {"type": "spc_t"}}), "set seLinuxOptions"),
    "privileged": (own(securityContext={"privileged": True}), "may not be privileged"),
    "escalation": (own(securityContext={"allowPrivilegeEscalation": True}), "may not be privileged"),
    "capabilities": (own(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), "add capabilities"),
    "capabilities kept": (own(securityContext={"capabilities": {"drop": []}}), "add capabilities"),
    "a root container": (own(securityContext={"runAsUser": 0}), "run as root"),
    "unmasked /proc": (own(securityContext={"procMount": "Unmasked"}), "procMount"),
    "no context at all": (worker({"securityContext": None}), "as in a PodSpec without null"),
    "a directive": (worker({"securityContext": {"$patch": "replace"}}), "directives ($patch)"),
    "a host port": (own(ports=[{"containerPort": 80, "hostPort": 80}]), "hostPort"),
    "a probe of another host": (
        own(livenessProbe={"tcpSocket": {"host": "10.0.0.1", "port": 1}}),
        "hostPort, and a host",
    ),
    "a hook of another host": (
        own(lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1", "port": 1}}}),
        "hostPort, and a host",
    ),
    "an unrestricted sidecar": (
        worker({"containers": [{"name": "side", "image": "x"}]}),
        "a container of your own needs",
    ),
    "a sidecar beside the controller": (controller({"containers": [SIDECAR]}), "they could use its token"),
    "a start beside the controller": (controller({"initContainers": [SIDECAR]}), "they could use its token"),
    "a variable from a Secret": (
        own(env=[{"name": "T", "valueFrom": {"secretKeyRef": {"name": "db-password", "key": "p"}}}]),
        "only hub is allowed",
    ),
    "variables from a Secret": (own(envFrom=[{"secretRef": {"name": "db-password"}}]), "only hub is allowed"),
    "a Secret as a volume": (volume(secret={"secretName": "db-password"}), "only hub is allowed"),
    "a projected Secret": (
        volume(projected={"sources": [{"secret": {"name": "db-password"}}]}),
        "only hub is allowed",
    ),
    "a Secret of a driver": (
        volume(csi={"driver": "secrets.example.com", "nodePublishSecretRef": {"name": "db-password"}}),
        "only hub is allowed",
    ),
    "a pull Secret": (worker({"imagePullSecrets": [{"name": "registry"}]}), "only hub is allowed"),
    "a Secret in the job's variables": (
        {"env": [secret_variable("db-password")]},
        "spec.env, spec.envFrom: Secrets: only",
    ),
    "a Secret for the job's variables": (
        {"envFrom": [{"secretRef": {"name": "db-password"}}]},
        "spec.env, spec.envFrom",
    ),
    "a label of others": (
        {"policy": {"template": {"metadata": {"labels": {"app": "postgres"}}}}},
        "spec.policy.template.metadata.labels: only team is allowed",
    ),
    "the rollout": (
        {"topology": "Disaggregated", "rollout": {"template": {"spec": {"hostIPC": True}}}},
        "spec.rollout.template.spec: automountServiceAccountToken, hostIPC, hostNetwork",
    ),
    "a large template": (own(env=[{"name": "A", "value": "x" * 70000}]), "expected at most 65536 bytes, found 70"),
    "large engine arguments": (
        {"rollout": {"engineArgs": {"hf_overrides": {"a": "x" * 3000}}}},
        "spec.rollout.engineArgs: expected at most 2048 bytes, found 30",
    ),
    "a large spec": (
        {"trainer": {"image": "x", "args": ["x" * 4000] * 25}},
        "spec: expected at most 98304 bytes, found 10",
    ),
    "a deep template": (worker(deep(800)), "expected at most 65536 bytes, found"),
    "text for a list": (worker({"containers": "privileged"}), "as in a PodSpec"),
    "text for a container": (worker({"containers": ["privileged"]}), "as in a PodSpec"),
    "a list for a volume": (worker({"volumes": [["a"]]}), "as in a PodSpec"),
}


def test_the_api_servers_type_checker_finds_no_mistake_in_the_policy(api: ApiClient, command_line: CommandLine) -> None:
    def status() -> Object:
        policy = command_line.get("validatingadmissionpolicy", "rljob-system-rljob-operator-rljobs")
        return dict(policy.get("status", {}))

    eventually(lambda: "typeChecking" in status(), "the policy to be checked")
    assert status()["typeChecking"] == {}


def test_the_policy_accepts(api: ApiClient) -> None:
    """And Pod Security `restricted` accepts the pods."""
    for name, spec in ACCEPTED.items():
        assert refusal(dry_run, api, spec) is None, name
        for pod in pods_of(spec):
            assert refusal(create_pod, api, pod) is None, name


def test_the_policy_refuses(api: ApiClient) -> None:
    for name, (spec, message_part) in REFUSED.items():
        refused = refusal(dry_run, api, spec)
        assert refused is not None, name
        assert POLICY in refused.message, name
        assert message_part in refused.message, name


def test_the_policy_limits_queues_and_their_priorities(api: ApiClient) -> None:
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
def test_the_page_has_the_verdict_on_every_field_of_kubernetes(api: ApiClient, kind: str) -> None:
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


def test_a_typical_large_template_is_cheap_enough_to_check(api: ApiClient, command_line: CommandLine) -> None:
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


def test_the_table_of_powers_holds(api: ApiClient) -> None:
    table = (EXAMPLES.parent / "docs" / "security.md").read_text().partition("| power |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    assert sorted(power for power, _, _ in rows) == sorted(POWERS)
    for power, by_pod_security, by_policy in rows:
        refused = any(refusal(create_pod, api, pod) for pod in pods_of(POWERS[power]))
        assert by_pod_security == ("refused" if refused else "allowed"), power
        assert by_policy.startswith("refused" if refusal(dry_run, api, POWERS[power]) else "allowed"), power


def test_the_policy_accepts_the_examples(api: ApiClient) -> None:
    examples = sorted(EXAMPLES.glob("*.yaml"))
    assert examples
    for document in (found for example in examples for found in yaml.safe_load_all(example.read_text())):
        document["metadata"]["namespace"] = "team-a"
        api.request("POST", RLJOBS, document, params={"dryRun": "All"})


def test_a_job_of_before_the_policy_may_change_in_other_fields(api: ApiClient, command_line: CommandLine) -> None:
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
    return list(
        build_job_objects(
            RLJob.model_validate(manifest(spec), by_alias=True, by_name=False),
            settings,
            namespace="team-a",
            uid="5f0c1c9a-0f3c-4d55-9f3b-6f2f3a3d6f10",
            attempt=1,
            plan=None,
            controller_placement="GpuFreeNodes",
            gang="Native",
            ray_token="a-token",
        ).pods
    )


def create_pod(api: ApiClient, pod: Object) -> None:
    """In a dry run, without names of objects that other admission plugins look for."""
    pod = copy.deepcopy(pod)
    for field in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        pod["spec"].pop(field, None)
    api.request("POST", "/api/v1/namespaces/team-a/pods", pod, params={"dryRun": "All"})
