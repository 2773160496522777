"""Properties of the cluster that tests of the operator rely on."""

from __future__ import annotations

import pytest

from rljob_testing.cluster.kubectl import Kubectl
from rljob_testing.operator.eventually import eventually
from tests.e2e.pods import is_unschedulable, phase, restarts, shell_pod, terminated


def test_a_pod_reaches_a_service_on_the_other_node_by_its_name(namespace: Kubectl, busybox: str) -> None:
    serve = "echo hello > /dev/shm/index.html && httpd -f -p 8080 -h /dev/shm"
    web = shell_pod("web", busybox, serve, node="gpu-node")
    ports = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}
    namespace.apply(web, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": ports})
    namespace.wait("pod", "web", lambda pod: phase(pod) == "Running")
    address = f"http://web.{namespace.namespace}.svc.cluster.local/"
    namespace.apply(shell_pod("client", busybox, f"until wget -q -O - {address}; do sleep 0.2; done", node="cpu-node"))
    namespace.wait("pod", "client", lambda pod: phase(pod) == "Succeeded")
    assert namespace("logs", "client").splitlines()[-1] == "hello"


def test_a_name_outside_the_cluster_is_refused_at_once(namespace: Kubectl, busybox: str) -> None:
    lookups = "for name in a b c d e; do time -p nslookup $name.example.com.; done; true"
    namespace.apply(shell_pod("lookup", busybox, lookups))
    namespace.wait("pod", "lookup", lambda pod: phase(pod) == "Succeeded")
    printed = namespace("logs", "lookup")
    assert "can't find a.example.com" in printed
    # The fastest: a busy machine delays some, a timeout all of them.
    assert min(float(rest.split()[0]) for rest in printed.split("real")[1:]) < 2


def test_pods_on_both_nodes_share_a_claim_as_an_ordinary_user(namespace: Kubectl, busybox: str) -> None:
    wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": wanted}
    write = shell_pod("writer", busybox, "id -u > /data/user", node="cpu-node", claim="shared")
    read = shell_pod("reader", busybox, "until grep . /data/user; do sleep 0.2; done", node="gpu-node", claim="shared")
    namespace.apply(claim, write, read)
    namespace.wait("pod", "reader", lambda pod: phase(pod) == "Succeeded")
    assert namespace("logs", "reader").splitlines()[-1] == "10001"


def test_gpus_are_counted_and_only_the_gpu_node_has_them(namespace: Kubectl, busybox: str) -> None:
    namespace.apply(shell_pod("all-gpus", busybox, "sleep 600", limits={"nvidia.com/gpu": "8"}))
    running = namespace.wait("pod", "all-gpus", lambda pod: phase(pod) == "Running")
    assert running["spec"]["nodeName"] == "gpu-node"
    namespace.apply(shell_pod("one-more", busybox, "true", limits={"nvidia.com/gpu": "1"}))
    pending = namespace.wait("pod", "one-more", is_unschedulable)
    assert "Insufficient nvidia.com/gpu" in pending["status"]["conditions"][0]["message"]


def test_the_gpu_node_is_labelled_as_gpu_feature_discovery_labels_it(kubectl: Kubectl) -> None:
    labels = kubectl.get("node", "gpu-node")["metadata"]["labels"]
    assert (labels["nvidia.com/gpu.present"], labels["nvidia.com/gpu.count"]) == ("true", "8")
    assert not any("nvidia" in label for label in kubectl.get("node", "cpu-node")["metadata"]["labels"])


def test_exec_runs_in_the_pod_on_its_node(namespace: Kubectl, busybox: str) -> None:
    namespace.apply(shell_pod("sleeper", busybox, "sleep 600", node="gpu-node"))
    namespace.wait("pod", "sleeper", lambda pod: phase(pod) == "Running")
    assert namespace("exec", "sleeper", "--", "hostname") == "sleeper\n"


def test_a_container_over_its_memory_limit_is_oom_killed(namespace: Kubectl, busybox: str) -> None:
    fill = "tail /dev/zero"
    namespace.apply(shell_pod("hungry", busybox, fill, limits={"memory": "32Mi"}))
    ended = terminated(namespace.wait("pod", "hungry", terminated))
    assert ended is not None
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_a_restart_rule_restarts_all_containers_of_the_same_pod_in_place(namespace: Kubectl, busybox: str) -> None:
    pod = shell_pod("again", busybox, "sleep 0.5; exit 42")
    rule = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}
    pod["spec"]["containers"][0] |= {"restartPolicy": "Never", "restartPolicyRules": [rule]}
    namespace.apply(pod)
    created = namespace.get("pod", "again")["metadata"]["uid"]
    restarted = namespace.wait("pod", "again", lambda pod: restarts(pod) >= 2)
    assert restarted["metadata"]["uid"] == created


def test_a_namespace_refuses_a_pod_that_may_be_root(namespace: Kubectl, busybox: str) -> None:
    pod = shell_pod("rootly", busybox, "true")
    pod["spec"]["securityContext"] = {}
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        namespace.apply(pod)


def test_a_deleted_claim_takes_its_folder_along(namespace: Kubectl, kubectl: Kubectl) -> None:
    wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "gone"}, "spec": wanted}
    namespace.apply(claim)
    bound = namespace.wait("pvc", "gone", lambda found: phase(found) == "Bound")
    volume = bound["spec"]["volumeName"]
    folder = kubectl.kubeconfig.parent / "volumes" / volume
    assert folder.is_dir()
    namespace("delete", "pvc", "gone")
    eventually(lambda: not folder.exists(), f"{folder} is removed")
