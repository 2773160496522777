"""Refusals of the API server as sentences for people: what was expected, what was found, what to do."""

from __future__ import annotations

import json
import re
from typing import Any

from rljob_client.errors import RunError

OTHER_CLUSTER = "select the cluster (kubectl config use-context NAME, KUBECONFIG)"
_RULE = re.compile(
    r'Invalid value: (?:"(?:object|array|string|integer|number|boolean)": )?(?=[A-Za-z])(?!(?:true|false): )'
)
"""Start of the message of a CEL rule. Its value is at most the name of a type."""
_NOT_CHECKED = "some validation rules were not checked"
_BEFORE_REASON = re.compile(r".*?(?:strict decoding error|denied the request|denied request): ", re.DOTALL)


class KubernetesError(RunError):
    """The API server refused a request or did not answer, or an object in the cluster is not as expected."""


class NoCluster(KubernetesError):
    """There is no kubeconfig, or the API server does not respond."""


class AccessDenied(KubernetesError):
    """The cluster does not accept the credentials, or they lack a right."""


class ObjectMissing(KubernetesError):
    """There is no such object."""


class ObjectExists(KubernetesError):
    """An object of this name exists."""


class ObjectChanged(KubernetesError):
    """The object was changed by another program at the same time."""


class ObjectRefused(KubernetesError):
    """The object is not valid, or a policy or quota of the cluster refuses it."""

    problems: tuple[tuple[str, str], ...] = ()
    """Field, such as spec.algorithm.steps or empty, and message of each problem."""


def refusal(status: int, body: bytes) -> KubernetesError:
    """The error for a response with HTTP status `status` and `body`, usually a metav1.Status."""
    try:
        parsed = json.loads(body)
    except ValueError:  # the page of a proxy
        parsed = None
    answer = parsed if isinstance(parsed, dict) else {}
    details = answer.get("details") or {}
    found = str(answer.get("message") or body.decode(errors="replace").strip() or f"HTTP status {status}").rstrip(".")
    match status:
        case 401:
            expected = f"expected credentials that the cluster accepts, found: {found}; log in again"
            return AccessDenied(f"{expected}, or {OTHER_CLUSTER}")
        case 403 if re.search(r"\bcannot [a-z]+ (resource|path)\b", found):
            advice = "ask the cluster's administrator for it (kubectl auth can-i --list)"
            return AccessDenied(f"expected permission, found: {found}; {advice}")
        case 404 if details.get("kind") == "namespaces":
            return ObjectMissing(f"expected a namespace, found: {found}; name an existing one")
        case 404 if not details.get("name"):
            expected = f"expected a cluster with RLJob's CRDs, found: {found}; install RLJob there"
            return KubernetesError(f"{expected}, or {OTHER_CLUSTER}")
        case 404:
            return ObjectMissing(f"{found}; check its name and its namespace")
        case 409 if answer.get("reason") == "AlreadyExists":
            return ObjectExists(f"expected a free name, found: {found}; choose another name, or delete the object")
        case 409:
            return ObjectChanged(f"expected an unchanged object, found: {found}; repeat the request")
        case 400 | 403 | 422:
            problems = _problems(details) or (("", _BEFORE_REASON.sub("", found)),)
            error = ObjectRefused("; ".join(": ".join(filter(None, problem)) for problem in problems))
            error.problems = problems
            return error
    return NoCluster(f"expected a cluster that responds, found: {found}; repeat the request later")


def _problems(details: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The causes of a refusal, each rule in its own words."""
    causes = [(str(c.get("field") or ""), str(c.get("message") or "")) for c in details.get("causes") or ()]
    return tuple(dict.fromkeys((field, _RULE.sub("", text)) for field, text in causes if _NOT_CHECKED not in text))
