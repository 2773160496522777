"""kubectl of this machine's cluster."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from rljob_testing.operator.api_client import ApiClient, ApiError
from rljob_testing.operator.eventually import EFFECT_SECONDS
from rljob_testing.patience import PATIENCE_SECONDS, Deadline

PLURALS = {
    "node": "nodes",
    "pod": "pods",
    "pvc": "persistentvolumeclaims",
    "rljob": "rljobs",
    "serviceaccount": "serviceaccounts",
    "stepreport": "stepreports",
}


@dataclass(frozen=True)
class Kubectl:
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
        api, deadline = ApiClient.from_kubeconfig(self.kubeconfig), Deadline(seconds)
        resource = PLURALS[kind]
        namespace = None if kind == "node" else self.namespace
        while (found := _find(api, resource, name, namespace)) is None or not holds(found):
            if deadline.passed:
                seen = found.get("status") if found else "it was not found"
                raise AssertionError(f"{kind} {name} is not as expected after {seconds:.0f} s: {seen}")
            time.sleep(0.2)
        return found


def _find(api: ApiClient, resource: str, name: str, namespace: str | None) -> dict[str, Any] | None:
    """None if the object does not exist, or if API server or etcd did not answer in time, as after a stall."""
    try:
        return api.find(resource, name, namespace)
    except httpx.TransportError:
        return None
    except ApiError as error:
        if error.status < 500:
            raise
        return None
