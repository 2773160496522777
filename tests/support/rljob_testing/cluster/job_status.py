"""The status of an RLJob, as users read it."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml

from rljob_testing.cluster.kubectl import Kubectl
from rljob_testing.operator.eventually import eventually
from rljob_testing.repository import EXAMPLES

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
    """Predicate for `Kubectl.wait`: the condition is true, and has this reason if one is given."""

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
    words = [f"{of['number']}: {of.get('reason')} ({of.get('message')})" for of in status(job).get("attempts", [])]
    return f"{status(job).get('restarts')} restarts; attempts {'; '.join(words)}"


def at_step(step: int, attempt_number: int = 1) -> Any:
    """Predicate for `Kubectl.wait`: the StepReport has at least `step` committed steps in this attempt."""
    return lambda report: status(report).get("attempt") == attempt_number and (status(report).get("step") or 0) >= step


def event_reasons(kubectl: Kubectl, job: str) -> list[str]:
    """Reasons of the Events about a job, oldest first."""
    selector = f"involvedObject.kind=RLJob,involvedObject.name={job}"
    events = json.loads(kubectl("get", "events", "--field-selector", selector, "-o", "json"))["items"]
    # The creationTimestamp has whole seconds, in which several Events are written.
    return [event["reason"] for event in sorted(events, key=lambda event: event["eventTime"])]


def wait_for_event(kubectl: Kubectl, job: str, reason: str) -> list[str]:
    """`event_reasons`, as soon as `reason` is one of them: the operator writes Events after the status, in order."""

    def look() -> list[str]:
        reasons = event_reasons(kubectl, job)
        return reasons if reason in reasons else []

    return eventually(look, f"an Event {reason} about {job}", context=lambda: event_reasons(kubectl, job))
