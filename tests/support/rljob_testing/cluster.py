"""The cluster of this machine as users see it: kubectl, the operator that Helm installs, jobs and their status."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from rljob_cluster.layout import ClusterLayout
from rljob_testing.operator.api_client import RequestRefused, ResourceClient
from rljob_testing.patience import EFFECT_SECONDS, PATIENCE_SECONDS, Deadline, eventually
from rljob_testing.repository import CHART, EXAMPLES

# kubectl of this machine's cluster.

PLURALS = {
    "node": "nodes",
    "pod": "pods",
    "pvc": "persistentvolumeclaims",
    "rljob": "rljobs",
    "serviceaccount": "serviceaccounts",
    "stepreport": "stepreports",
}


@dataclass(frozen=True)
class AdminKubectl:
    """kubectl of the cluster in one namespace, as administrator."""

    program: Path
    kubeconfig: Path
    namespace: str = "default"

    def __call__(self, *words: str, input: str | None = None, check: bool = True) -> str:
        """Output of kubectl; its error output if it fails and `check` is off."""
        command = [str(self.program), "--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace, *words]
        done = subprocess.run(
            command, input=input, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(words)}: {done.stderr}")
        return done.stdout if done.returncode == 0 else done.stderr

    def apply(self, *objects: dict[str, Any]) -> str:
        return self("apply", "-f", "-", input=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def wait(
        self, kind: str, name: str, holds: Callable[[dict[str, Any]], Any], seconds: float = EFFECT_SECONDS
    ) -> dict[str, Any]:
        """The object, as soon as it exists and `holds` is true. Polls without kubectl (0.1 s of CPU time a call)."""
        api, deadline = ResourceClient.from_kubeconfig(self.kubeconfig), Deadline(seconds)
        resource = PLURALS[kind]
        namespace = None if kind == "node" else self.namespace
        while (found := _find(api, resource, name, namespace)) is None or not holds(found):
            if deadline.passed:
                seen = found.get("status") if found else "it was not found"
                raise AssertionError(f"{kind} {name} is not as expected after {seconds:.0f} s: {seen}")
            time.sleep(0.2)
        return found


def _find(api: ResourceClient, resource: str, name: str, namespace: str | None) -> dict[str, Any] | None:
    """None if the object does not exist, or if API server or etcd did not answer in time, as after a stall."""
    try:
        return api.find(resource, name, namespace)
    except httpx.TransportError:
        return None
    except RequestRefused as error:
        if error.status < 500:
            raise
        return None


# The operator as users install it: images on the nodes, the chart by Helm.

RELEASE, NAMESPACE = "rljob", "rljob-system"

# Short times, so that tests of a timeout do not wait long.
VALUES = (
    "trainer.device=cpu",
    "podDiagnosis.enabled=true",
    "jobs.restartDelaySeconds=1",
    "jobs.statusIntervalSeconds=1",
    # No pod takes that long on a busy machine: a test of this timeout installs the operator with a shorter one.
    "jobs.startTimeoutSeconds=600",
    # Images of one version differ from run to run: the operator's pod is replaced, so that it has the latest.
    f"podAnnotations.test-run={time.time_ns():x}",
)


@dataclass(frozen=True)
class InstalledOperator:
    """A release of the chart in the cluster."""

    cluster: ClusterLayout

    def install(self, *values: str) -> None:
        """Install or upgrade, and wait until the operator is ready."""
        settings = [word for value in (*VALUES, *values) for word in ("--set", value)]
        self._helm("upgrade", "--install", RELEASE, str(CHART), "--create-namespace", "--wait", *settings)

    def uninstall(self) -> None:
        self._helm("uninstall", RELEASE, "--wait")

    def _helm(self, *words: str) -> None:
        command = [str(self.cluster.binaries / "helm"), "--namespace", NAMESPACE, *words]
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr


# The status of an RLJob, as users read it.

Object = dict[str, Any]


def digits(name: str = "digits", **spec: Any) -> Object:
    """The digits example with parts of its spec replaced; dictionaries are merged."""
    job: Object = yaml.safe_load((EXAMPLES / "digits.yaml").read_text())
    job["metadata"]["name"] = name
    job["spec"] = _merged(job["spec"], spec)
    return job


def _merged(base: Object, changes: Object) -> Object:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def status(job: Object) -> Object:
    found: Object = job.get("status") or {}
    return found


def condition(job: Object, type_: str) -> Object:
    return next((c for c in status(job).get("conditions", []) if c["type"] == type_), {"status": "Unknown"})


def holds(type_: str, reason: str | None = None) -> Any:
    """Predicate for `AdminKubectl.wait`: the condition is true, and has this reason if one is given."""

    def check(job: Object) -> bool:
        found = condition(job, type_)
        return bool(found["status"] == "True" and reason in (None, found["reason"]))

    return check


def finished(job: Object) -> bool:
    return any(condition(job, type_)["status"] == "True" for type_ in ("Complete", "Failed"))


def attempt(job: Object) -> Object:
    """The latest attempt."""
    found: Object = (status(job).get("attempts") or [{}])[-1]
    return found


def account(job: Object) -> str:
    """The ends of all attempts, for the message of an assertion."""
    ends = [f"{a['number']}: {a.get('reason')} ({a.get('message')})" for a in status(job).get("attempts", [])]
    return f"{status(job).get('restarts')} restarts; attempts {'; '.join(ends)}"


def at_step(step: int, attempt_number: int = 1) -> Any:
    """Predicate for `AdminKubectl.wait`: the StepReport has at least `step` committed steps in this attempt."""
    return lambda report: status(report).get("attempt") == attempt_number and (status(report).get("step") or 0) >= step


def event_reasons(kubectl: AdminKubectl, job: str) -> list[str]:
    """Reasons of the Events about a job, oldest first."""
    selector = f"involvedObject.kind=RLJob,involvedObject.name={job}"
    events = json.loads(kubectl("get", "events", "--field-selector", selector, "-o", "json"))["items"]
    # The creationTimestamp has whole seconds, in which several Events are written.
    return [event["reason"] for event in sorted(events, key=lambda event: event["eventTime"])]


def wait_for_event(kubectl: AdminKubectl, job: str, reason: str) -> list[str]:
    """`event_reasons`, as soon as `reason` is one of them: the operator writes Events after the status, in order."""

    def look() -> list[str]:
        reasons = event_reasons(kubectl, job)
        return reasons if reason in reasons else []

    return eventually(look, f"an Event {reason} about {job}", context=lambda: event_reasons(kubectl, job))
