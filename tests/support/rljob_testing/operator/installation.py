"""The operator's ServiceAccount with exactly the permissions of the chart, and files of other projects' Go modules."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.repository import CHART

RELEASE = "rljob-operator"
_RIGHTS = ("serviceaccount", "rbac-operator", "step-report-policy")


def rendered_rights(
    helm: Path, namespace: str, job_namespaces: Iterable[str] = (), *, diagnose_pods: bool = False
) -> list[dict[str, Any]]:
    """ServiceAccount, roles and bindings, and the policy for StepReports, as `helm install` creates them. Without
    `job_namespaces`: cluster-wide."""
    watched = f"namespaces={json.dumps(list(job_namespaces))}"
    diagnosis = f"podDiagnosis.enabled={json.dumps(diagnose_pods)}"
    return rendered(helm, namespace, *_RIGHTS, values=("--set-json", watched, "--set", diagnosis))


def rendered(helm: Path, namespace: str, *templates: str, values: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Objects of these templates of the chart. `values`: arguments of Helm."""
    only = [argument for name in templates for argument in ("--show-only", f"templates/{name}.yaml")]
    command = [str(helm), "template", RELEASE, str(CHART), "--namespace", namespace, *values, *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def install(
    api: ResourceClient, helm: Path, namespace: str, job_namespaces: Iterable[str] = (), *, diagnose_pods: bool = False
) -> str:
    """Create the namespace, apply the permissions, and return a token of the operator's ServiceAccount."""
    api.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    rights = rendered_rights(helm, namespace, job_namespaces, diagnose_pods=diagnose_pods)
    for manifest in rights:
        api.apply(_plural(manifest["kind"]), manifest, manifest["metadata"].get("namespace"))
    [account] = [manifest["metadata"]["name"] for manifest in rights if manifest["kind"] == "ServiceAccount"]
    return token_of(api, namespace, account)


def _plural(kind: str) -> str:
    return f"{kind.lower().removesuffix('y')}ies" if kind.endswith("y") else f"{kind.lower()}s"


def token_of(api: ResourceClient, namespace: str, service_account: str, pod: dict[str, Any] | None = None) -> str:
    """A token of the ServiceAccount, valid for an hour. `pod`: bound to this pod, as a kubelet mounts it."""
    spec: dict[str, Any] = {"expirationSeconds": 3600}
    if pod is not None:
        spec["boundObjectRef"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = api.create_below("serviceaccounts", service_account, "token", request, namespace)
    return str(answer["status"]["token"])


KUEUE = ("sigs.k8s.io/kueue@v0.19.0", "config/components/crd/bases/*.yaml")
VOLCANO = ("volcano.sh/volcano@v1.10.0", "config/crd/volcano/bases/scheduling.volcano.sh_*.yaml")


class ModuleUnavailable(Exception):
    """Go is not installed, or the module cannot be downloaded; the message names which."""


def module_files(module: str, pattern: str) -> list[Path]:
    """Files of `module` (path@version) by a glob. The module is downloaded into Go's cache if necessary."""
    command = ["go", "mod", "download", "-json", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModuleUnavailable(f"{' '.join(command)}: {error}") from None
    answer = json.loads(done.stdout or "{}")
    if "Dir" not in answer:
        raise ModuleUnavailable(f"{' '.join(command)}: {answer.get('Error', done.stderr.strip())}")
    return sorted(Path(answer["Dir"]).glob(pattern))
