"""The user's kubectl: its configuration, credentials and plugins apply."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from rljob_trainer.errors import TrainerError


class ClusterError(TrainerError):
    """kubectl failed, or an object in the cluster is not as expected."""


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

    def run(self, *words: str, stdin: str | None = None) -> str:
        """The output of kubectl. Raises ClusterError."""
        return self.output(*words, stdin=stdin).decode(errors="replace")

    def output(self, *words: str, stdin: str | None = None) -> bytes:
        """The output of kubectl as it is. Raises ClusterError."""
        given = None if stdin is None else stdin.encode()
        try:
            done = subprocess.run(self._command(words), input=given, capture_output=True, check=False)
        except FileNotFoundError:
            raise ClusterError("expected kubectl in PATH, found none: install it") from None
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout

    def stream(self, *words: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """kubectl with its output as a pipe."""
        return subprocess.Popen(self._command(words), stdout=subprocess.PIPE, stderr=errors)

    def _command(self, words: Sequence[str]) -> list[str]:
        options = {"--context": self.context, "--namespace": self.namespace}
        given = [f"{option}={value}" for option, value in options.items() if value is not None]
        return ["kubectl", *given, *words]
