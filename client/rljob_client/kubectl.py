"""The user's kubectl: its configuration, credentials and plugins apply."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from rljob_client.errors import RunError

_LOG_LINE = re.compile(r"[EWIF]\d{4} \d\d:\d\d:\d\d|Warning: ")
"""A log line that kubectl prints before its error message."""

_OTHER_CLUSTER = "select the cluster (kubectl config use-context NAME, KUBECONFIG)"
_KNOWN_FAILURES = (
    (r"doesn't have a resource type", "a cluster with RLJob's CRDs", f"install RLJob there, or {_OTHER_CLUSTER}"),
    (r"[Ff]orbidden", "permission", "ask the cluster's administrator for it (kubectl auth can-i --list)"),
    (
        r"Unauthorized|logged in|credentials|enter Username|exec plugin",
        "credentials that the cluster accepts",
        f"log in again, or {_OTHER_CLUSTER}",
    ),
    (r"context.*(?:not found|not exist)|no context exists", "a context", "see kubectl config get-contexts"),
    (
        r"config file|[Ii]nvalid configuration|Error in configuration",
        "a kubeconfig",
        "correct the file, or set KUBECONFIG",
    ),
    (r"namespaces? .*not found", "a namespace", "name an existing one with -n"),
    (
        r"connect|dial tcp|timeout|timed out|refused|no such host|no route|x509|tls:",
        "a cluster that responds",
        f"start it, or {_OTHER_CLUSTER}",
    ),
)
"""Failures of kubectl by their message: what was expected, and what to do. The first that fits counts."""


class KubectlError(RunError):
    """kubectl failed, or an object in the cluster is not as expected."""


def explain_failure(command: str, stderr: str) -> str:
    """One line about a failure of kubectl. `command`: kubectl's arguments. `stderr`: its output."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    message = next((line for line in lines if not _LOG_LINE.match(line)), lines[-1] if lines else "no message").strip()
    for pattern, expected, advice in _KNOWN_FAILURES:
        if re.search(pattern, message):
            return f"expected {expected}, found: {message.rstrip('.')}; {advice}"
    return f"kubectl {command}: {message}"


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl in one context and namespace; None: the current ones."""

    context: str | None = None
    namespace: str | None = None

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """The object; None if it does not exist. Raises ClusterError."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """The output of kubectl. Raises ClusterError."""
        return self.output(*arguments, stdin=stdin).decode(errors="replace")

    def output(self, *arguments: str, stdin: str | None = None) -> bytes:
        """The output of kubectl as it is. Raises ClusterError."""
        # Without input, kubectl must not wait for a user name.
        given = (stdin or "").encode()
        try:
            done = subprocess.run(self._command(arguments), input=given, capture_output=True, check=False)
        except FileNotFoundError:
            raise KubectlError("expected kubectl in PATH, found none: install it") from None
        except OSError as error:
            raise KubectlError(f"expected kubectl in PATH, found: {error}; install it") from None
        if done.returncode != 0:
            raise KubectlError(explain_failure(" ".join(arguments), done.stderr.decode(errors="replace")))
        return done.stdout

    def stream(self, *arguments: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """kubectl with its output as a pipe."""
        command = self._command(arguments)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        options = {"--context": self.context, "--namespace": self.namespace}
        given = [f"{option}={value}" for option, value in options.items() if value is not None]
        return ["kubectl", *given, *arguments]
