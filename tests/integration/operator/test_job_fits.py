"""A job that does not fit: the condition Fits, no pods under `Enforce`, and the answer of the webhook to kubectl."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import yaml

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_cluster.certificates import Authority
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import GPU_PRODUCTS
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.installation import rendered
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.simulated_kubelet import GPU_NODE, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for
from tests.integration.operator.conftest import Kubectl, RestartedWith

ENFORCE = {"memory": {"admission": "Enforce"}}
LARGE: dict[str, Any] = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "algorithm": {"maxResponseTokens": 4096}}
"""A job whose state and gradients take more than a GPU of 40 GB."""
SMALL: dict[str, Any] = {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}}
TOO_LARGE = {"kvCache": "64Gi"}
"""A pinned setting with which it does not fit."""


@pytest.fixture(autouse=True)
def gpus_of_40_gb(api: ResourceClient, kubelet: SimulatedKubelet) -> Iterator[None]:
    """The node's label, as of GPU feature discovery."""
    api.merge("nodes", GPU_NODE, {"metadata": {"labels": {GPU_PRODUCTS[0]: "NVIDIA-A100-SXM4-40GB"}}})
    yield
    api.merge("nodes", GPU_NODE, {"metadata": {"labels": {GPU_PRODUCTS[0]: None}}})


def known_to_the_operator(job: WatchedJob) -> None:
    """Return when the operator knows the node's label."""
    job.create(**SMALL).wait_for(ConditionType.FITS, "True", ConditionReason.PREDICTED_TO_FIT)
    job.delete()
    job.wait_gone()


def test_a_job_that_does_not_fit_has_no_pods_if_enforced_and_starts_once_its_spec_fits(job: WatchedJob) -> None:
    known_to_the_operator(job)
    job.create(**SMALL, memory={**TOO_LARGE, **ENFORCE["memory"]})
    found = job.wait_for(ConditionType.FITS, "False", ConditionReason.DOES_NOT_FIT)
    assert "on 1 × a100-40 (39.40 GiB)" in found["message"]
    assert "it fits with memory.kvCache: Auto" in found["message"]
    job.wait_for(ConditionType.STALLED, "True", ConditionReason.NOT_ADMITTED)
    holds_for(1.0, lambda: not job.pods, "no pods")
    eventually(lambda: "DoesNotFit" in job.event_reasons(), "the Event")
    job.change(memory={"kvCache": "Auto"})
    job.wait_for_pods(2)
    assert job.condition(ConditionType.FITS)["status"] == "True"


def test_by_default_it_is_warned_of_and_starts(job: WatchedJob) -> None:
    known_to_the_operator(job)
    job.create(**LARGE).wait_for(ConditionType.FITS, "False", ConditionReason.DOES_NOT_FIT)
    job.run()
    job.wait_for(ConditionType.FITS, "True", ConditionReason.STEPS_COMMITTED)


# --- the webhook ---


Call = Callable[[int], None]


@pytest.fixture
def certificate(tmp_path: Path) -> Authority:
    """The webhook's, in `tmp_path / tls` as a Secret is mounted."""
    authority = Authority(tmp_path / "authority")
    authority.ensure()
    pair = authority.server("webhook", ("127.0.0.1",))
    (tmp_path / "tls").mkdir()
    copyfile(pair.certificate, tmp_path / "tls" / "tls.crt")
    copyfile(pair.key, tmp_path / "tls" / "tls.key")
    return authority


@pytest.fixture
def called(api: ResourceClient, control_plane: ControlPlane, certificate: Authority) -> Iterator[Call]:
    """Creates the chart's configuration, by which the API server calls this machine's port: there are no Services."""
    [manifest] = [
        found
        for found in rendered(control_plane.kubectl.with_name("helm"), "rljob-system", "admission-webhook")
        if found["kind"] == "ValidatingWebhookConfiguration"
    ]
    [webhook] = manifest["webhooks"]

    def call(port: int) -> None:
        bundle = b64encode(certificate.pair.certificate.read_bytes()).decode()
        webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}/validate", "caBundle": bundle}
        webhook["timeoutSeconds"] = 30  # and 30 for a busy machine
        api.apply("validatingwebhookconfigurations", manifest)

    yield call
    api.delete("validatingwebhookconfigurations", manifest["metadata"]["name"])


def applied(kubectl: Kubectl, name: str, *options: str, **spec: Any) -> tuple[bool, str]:
    """Outcome and messages of `kubectl apply`."""
    done = kubectl("apply", *options, "-f", "-", stdin=yaml.safe_dump(manifests.job(name, **spec)), check=False)
    return done.returncode == 0, done.stderr


def answered(kubectl: Kubectl, name: str, **spec: Any) -> tuple[bool, str]:
    """Outcome and messages of a dry run to which the webhook objects. If it is too late, on a busy machine, the API
    server accepts the job without a word."""
    outcome = False, ""

    def objects() -> bool:
        nonlocal outcome
        outcome = applied(kubectl, name, "--dry-run=server", **spec)
        return "does not fit" in outcome[1]

    eventually(objects, f"the webhook's answer about the job {name}")
    return outcome


def test_kubectl_apply_warns_or_is_refused_and_without_an_operator_is_neither(
    operator: OperatorProcess,
    restarted_with: RestartedWith,
    called: Call,
    kubectl: Kubectl,
    job: WatchedJob,
    ports: Iterator[int],
    tmp_path: Path,
) -> None:
    port = next(ports)
    with restarted_with(admission_certificate=str(tmp_path / "tls"), admission_port=port):
        called(port)
        ok, messages = answered(kubectl, "warned", **LARGE)
        assert ok
        assert "Warning: spec: on 1 × a100-40 (39.40 GiB)" in messages
        assert "the job does not fit, because the update needs" in messages
        ok, messages = answered(kubectl, "refused", **LARGE, **ENFORCE)
        assert not ok
        assert "denied the request: spec: on 1 × a100-40" in messages
        assert applied(kubectl, "fitting", **SMALL, **ENFORCE) == (True, "")
        ok, messages = answered(kubectl, "fitting", **SMALL, memory={**TOO_LARGE, **ENFORCE["memory"]})
        assert not ok
        assert "it fits with memory.kvCache: Auto" in messages
        assert applied(kubectl, "other", **LARGE, trainer={"image": "verl:1"}) == (True, "")
        job.create(**SMALL).run()  # the operator writes annotations and finalizers of jobs meanwhile
        operator.kill()
        assert applied(kubectl, "nobody", **LARGE, **ENFORCE) == (True, ""), "without an answer, the job is stored"
    nobody = replace(job, name="nobody")
    nobody.wait_for(ConditionType.FITS, "False", ConditionReason.DOES_NOT_FIT)
    holds_for(0.5, lambda: not nobody.pods, "no pods")


def test_a_replica_that_stands_by_answers_too(
    operator: OperatorProcess, called: Call, kubectl: Kubectl, ports: Iterator[int], tmp_path: Path
) -> None:
    port = next(ports)
    settings = {**operator.settings, "admission_certificate": str(tmp_path / "tls"), "admission_port": port}
    standby = OperatorProcess(operator.kubeconfig, tmp_path / "log", next(ports), next(ports), settings)
    standby.start()
    try:
        called(port)
        assert not answered(kubectl, "refused", **LARGE, **ENFORCE)[0]
    finally:
        standby.stop()
