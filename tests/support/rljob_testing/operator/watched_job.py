"""One job under test: create, move and observe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.termination_message import TerminationMessage
from rljob_operator.labels import TRAINER_FIELD_MANAGER
from rljob_operator.names import controller_pod_name, worker_pod_name
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.simulated_kubelet import Pod, SimulatedKubelet
from rljob_testing.patience import EFFECT_SECONDS, eventually

Object = dict[str, Any]


@dataclass
class WatchedJob:
    """An RLJob by namespace and name. Awaited states must be reached within EFFECT_SECONDS."""

    api: ResourceClient
    kubelet: SimulatedKubelet
    namespace: str
    name: str = "job"

    # --- what a user does ---

    def create(self, **spec: Any) -> WatchedJob:
        self.api.create("rljobs", manifests.job(self.name, **spec), self.namespace)
        return self

    def change(self, **spec: Any) -> None:
        self.api.merge("rljobs", self.name, {"spec": spec}, self.namespace)

    def delete(self) -> None:
        self.api.delete("rljobs", self.name, self.namespace)

    # --- what its pods do ---

    def run(self, step: int = 1, **fields: Any) -> WatchedJob:
        """With healthy nodes: wait until all pods run, and have the controller report `step` committed steps, with
        `fields`."""
        self.kubelet.follow(self.namespace)
        self.wait_for(ConditionType.RUNNING)
        self.report(step, **fields)
        return self

    def report(self, step: int, attempt: int = 1, **fields: Any) -> None:
        """Apply the status of the StepReport as the controller pod does."""
        report = manifests.step_report(self.name, attempt, step, **fields)
        self.api.apply("stepreports", report, self.namespace, manager=TRAINER_FIELD_MANAGER, subresource="status")

    def end_controller(self, exit_code: int, step: int = 10, **ending: Any) -> None:
        """End the controller pod as the trainer does, with a termination message."""
        text = ExitCode(exit_code).meaning if exit_code in list(ExitCode) else "killed"
        message = TerminationMessage(exit_code=exit_code, message=text, step=step)
        pod = self.api.get("pods", controller_pod_name(self.name), self.namespace)
        self.kubelet.end(pod, exit_code, message=message, **ending)

    def complete(self, steps: int = 10, attempt: int = 1) -> None:
        self.report(steps, attempt)
        self.end_controller(ExitCode.COMPLETE, steps)
        self.wait_for(ConditionType.COMPLETE)

    # --- what is to be seen ---

    @property
    def object(self) -> Object:
        return self.api.get("rljobs", self.name, self.namespace)

    @property
    def status(self) -> Object:
        return dict(self.object.get("status", {}))

    @property
    def step_report(self) -> Object:
        """Status of its StepReport."""
        return dict(self.api.get("stepreports", self.name, self.namespace).get("status", {}))

    @property
    def phase(self) -> str:
        return str(self.status.get("display", {}).get("phase", ""))

    @property
    def attempts(self) -> list[Object]:
        return list(self.status.get("attempts", []))

    @property
    def attempt(self) -> int:
        """Number of the latest attempt."""
        return int(self.attempts[-1]["number"])

    def condition(self, type_: ConditionType) -> Object:
        """The condition; empty if it does not exist."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == type_), {})

    def wait_for(
        self,
        type_: ConditionType,
        status: str = "True",
        reason: ConditionReason | None = None,
        timeout: float = EFFECT_SECONDS,
    ) -> Object:
        """The condition, once it has this status, and this reason if one is given."""

        def reached() -> Object | None:
            condition = self.condition(type_)
            fits = condition.get("status") == status and reason in (None, condition.get("reason"))
            return condition if fits else None

        wanted = f"{type_}={status} {reason or ''}"
        found = eventually(reached, wanted, timeout, lambda: self.status.get("conditions"))
        assert found is not None
        return found

    @property
    def pods(self) -> dict[str, Pod]:
        """Its pods by name."""
        found = self.kubelet.pods(self.namespace)
        uid = self.object["metadata"]["uid"]
        return {p["metadata"]["name"]: p for p in found if p["metadata"]["ownerReferences"][0]["uid"] == uid}

    def controller_pod(self) -> Pod:
        return self.pods[controller_pod_name(self.name)]

    def policy_pod(self, index: int = 0) -> Pod:
        return self.pods[worker_pod_name(self.name, "policy", index)]

    def wait_for_pods(self, count: int = 2, timeout: float = EFFECT_SECONDS) -> dict[str, Pod]:
        """Wait until it has exactly `count` pods."""
        eventually(lambda: len(self.pods) == count, f"{count} pods", timeout, lambda: (list(self.pods), self.status))
        return self.pods

    def wait_gone(self, timeout: float = EFFECT_SECONDS) -> None:
        eventually(
            lambda: self.api.find("rljobs", self.name, self.namespace) is None, f"{self.name} to be gone", timeout
        )

    def event_reasons(self) -> list[str]:
        """Reasons of its Events, in the order of first occurrence."""
        events = [e for e in self.api.list("events", self.namespace) if e["involvedObject"]["name"] == self.name]
        return [e["reason"] for e in sorted(events, key=_first_seen)]


def _first_seen(event: Object) -> str:
    return str(event.get("eventTime") or event.get("firstTimestamp") or event["metadata"]["creationTimestamp"])
