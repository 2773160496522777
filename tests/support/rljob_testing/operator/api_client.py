"""A plain client of the API server for tests."""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Self

import httpx
import yaml

Object = dict[str, Any]
Parameters = ParamSpec("Parameters")

_RESOURCES = {
    "v1": "namespaces nodes pods services configmaps secrets events "
    "serviceaccounts persistentvolumeclaims resourcequotas",
    "rljob.dev/v1alpha1": "rljobs stepreports memoryprofiles",
    "networking.k8s.io/v1": "networkpolicies",
    "rbac.authorization.k8s.io/v1": "roles rolebindings clusterroles clusterrolebindings",
    "apiextensions.k8s.io/v1": "customresourcedefinitions",
    "admissionregistration.k8s.io/v1": "validatingadmissionpolicies validatingadmissionpolicybindings "
    "validatingwebhookconfigurations",
    "coordination.k8s.io/v1": "leases",
    "scheduling.volcano.sh/v1beta1": "podgroups",
    "ray.io/v1": "rayclusters",
}
_GROUPS = {plural: group for group, plurals in _RESOURCES.items() for plural in plurals.split()}


class RequestRefused(Exception):
    """A refusal of the API server: HTTP status, reason (`Invalid`, `Forbidden`, …) and message."""

    def __init__(self, status: int, body: Object) -> None:
        self.status = status
        self.reason = str(body.get("reason", ""))
        self.message = str(body.get("message", body))
        self.causes = [
            (str(cause.get("field", "")), str(cause.get("message", "")))
            for cause in body.get("details", {}).get("causes", [])
        ]
        super().__init__(f"{status} {self.reason}: {self.message}")


def refusal(
    call: Callable[Parameters, object], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> RequestRefused | None:
    """The API server's refusal of `call`; None if it was allowed."""
    try:
        call(*args, **kwargs)
    except RequestRefused as error:
        return error
    return None


class ResourceClient:
    """One identity at one API server. Resources have their plural names: `api.get("pods", "name", "namespace")`."""

    def __init__(self, url: str, context: ssl.SSLContext, token: str | None = None) -> None:
        self.url = url
        self._context = context
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, verify=context, headers=headers, timeout=120)

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Self:
        """The identity of the current context, by client certificate."""
        config = yaml.safe_load(path.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority").decode())
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(_pem(user, "client-certificate") + b"\n" + _pem(user, "client-key"))
            pair.flush()
            context.load_cert_chain(pair.name)
        return cls(cluster["server"], context)

    def as_token(self, token: str, ca: Path) -> ResourceClient:
        """The same API server with another identity."""
        return ResourceClient(self.url, ssl.create_default_context(cafile=str(ca)), token)

    def get(self, resource: str, name: str, namespace: str | None = None) -> Object:
        return self.request("GET", _path(resource, namespace, name))

    def find(self, resource: str, name: str, namespace: str | None = None) -> Object | None:
        """The object; None if it does not exist."""
        try:
            return self.get(resource, name, namespace)
        except RequestRefused as error:
            if error.status == 404:
                return None
            raise

    def list(self, resource: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """Without `namespace`: in all namespaces."""
        items: list[Object] = []
        params = {"labelSelector": selector, "limit": "500"}
        while True:
            found = self.request("GET", _path(resource, namespace), params=params)
            items += found["items"]
            if not (following := found["metadata"].get("continue")):
                return items
            params["continue"] = following

    def create(self, resource: str, body: Object, namespace: str | None = None) -> Object:
        return self.request("POST", _path(resource, namespace), body=body, params={"fieldValidation": "Strict"})

    def post_text(self, path: str, text: str) -> int:
        """Post JSON as it is, without validation here; returns the HTTP status."""
        headers = {"Content-Type": "application/json"}
        return self._http.post(path, content=text.encode(), headers=headers).status_code

    def create_below(self, resource: str, name: str, subresource: str, body: Object, namespace: str) -> Object:
        """Create a subresource such as pods/binding or serviceaccounts/token."""
        return self.request("POST", f"{_path(resource, namespace, name)}/{subresource}", body=body)

    def merge(
        self, resource: str, name: str, patch: Object, namespace: str | None = None, subresource: str = ""
    ) -> Object:
        """A JSON merge patch, as `kubectl patch --type=merge`."""
        return self._patch("application/merge-patch+json", resource, name, patch, namespace, subresource)

    def patch_status(self, resource: str, name: str, status: Object, namespace: str | None = None) -> Object:
        """A strategic merge patch of the status, as a kubelet sends it."""
        body = {"status": status}
        return self._patch("application/strategic-merge-patch+json", resource, name, body, namespace, "status")

    def resize(self, pod: str, patch: Object, namespace: str) -> Object:
        """A strategic merge patch of the resources of a pod's containers."""
        return self._patch("application/strategic-merge-patch+json", "pods", pod, patch, namespace, "resize")

    def apply(
        self,
        resource: str,
        body: Object,
        namespace: str | None = None,
        manager: str = "tests",
        subresource: str = "",
    ) -> Object:
        """Server-side apply."""
        params = {"fieldManager": manager, "force": "true"}
        name = body["metadata"]["name"]
        return self._patch("application/apply-patch+yaml", resource, name, body, namespace, subresource, params)

    def delete(self, resource: str, name: str, namespace: str | None = None, grace_seconds: int | None = None) -> None:
        """`grace_seconds` 0: delete at once, as a kubelet does after a pod's processes have ended."""
        options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        self.request("DELETE", _path(resource, namespace, name), body={"propagationPolicy": "Background", **options})

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        params: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Any request. Raises ApiError if it is refused."""
        headers = {"Content-Type": content_type}
        answer = self._http.request(method, path, json=body, params=params, headers=headers)
        data: Object = answer.json() if answer.headers["content-type"].startswith("application/json") else {}
        if answer.is_error:
            raise RequestRefused(answer.status_code, data or {"message": answer.text})
        return data

    def _patch(
        self,
        content_type: str,
        resource: str,
        name: str,
        body: Object,
        namespace: str | None,
        subresource: str = "",
        params: dict[str, str] | None = None,
    ) -> Object:
        path = _path(resource, namespace, name) + (f"/{subresource}" if subresource else "")
        return self.request("PATCH", path, body, params, content_type)


def _path(resource: str, namespace: str | None, name: str = "") -> str:
    group = _GROUPS[resource]
    is_cluster_scoped = resource.startswith(("namespaces", "nodes", "cluster", "custom", "validating"))
    within = f"/namespaces/{namespace}" if namespace and not is_cluster_scoped else ""
    return f"/{'api' if group == 'v1' else 'apis'}/{group}{within}/{resource}" + (f"/{name}" if name else "")


def _pem(section: Object, field: str) -> bytes:
    if f"{field}-data" in section:
        return base64.b64decode(section[f"{field}-data"])
    return Path(section[field]).read_bytes()
