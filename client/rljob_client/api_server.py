"""Requests to a Kubernetes API server on plain dictionaries, by the package `kubernetes`.

The package provides configuration, credentials, TLS and HTTP. It is imported when it is needed, since that takes a
second. Its models are not used: objects have the field names of their manifests.
"""

from __future__ import annotations

import copy
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from yaml import YAMLError

from rljob_api.metadata import API_VERSION
from rljob_client.api_errors import OTHER_CLUSTER, NoCluster, ObjectMissing, refusal

Object = dict[str, Any]

_ROOTS = {"rljobs": f"/apis/{API_VERSION}", "stepreports": f"/apis/{API_VERSION}", "rayjobs": "/apis/ray.io/v1"}
"""API of a resource; by default the core API."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT = (10.0, 60.0)
"""Seconds for a connection, and between two parts of a response."""
_WATCH_SECONDS = 240
"""Duration of one watch request, after which the objects are listed again."""
_OUTAGE_SECONDS = 120.0
"""Longest outage of the API server that a watch survives."""
_RETRY_SECONDS = 2.0
_WRITER = {"fieldValidation": "Strict", "fieldManager": "rljob-client"}
_JSON, _MERGE_PATCH = "application/json", "application/merge-patch+json"
_EXEC_PROTOCOL = "v4.channel.k8s.io"
_OUTPUT, _ERRORS, _STATUS = 1, 2, 3
"""Channels of that protocol."""


class ApiServer:
    """One identity at one API server, in one namespace."""

    def __init__(self, context: str | None = None, namespace: str | None = None, kubeconfig: str | None = None) -> None:
        """Read the configuration; None stands for what kubectl would use. Raises NoCluster."""
        from kubernetes.client import ApiClient

        self._configuration, current = _configuration(context, kubeconfig)
        self._client = ApiClient(self._configuration)
        self.namespace = namespace or current

    def at(self, namespace: str) -> ApiServer:
        """The same connection, for another namespace."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    # --- objects ---

    def get(self, resource: str, name: str) -> Object:
        """The object. All methods raise subclasses of KubernetesError."""
        return self._request("GET", self._path(resource, name))

    def find(self, resource: str, name: str) -> Object | None:
        """The object; None if it does not exist."""
        try:
            return self.get(resource, name)
        except ObjectMissing:
            return None

    def list(self, resource: str, **selectors: str) -> list[Object]:
        """The objects; of all namespaces if `namespace` is empty. `selectors`: labelSelector, fieldSelector."""
        items: list[Object] = []
        query = {**selectors, "limit": "500"}
        while True:
            found = self._request("GET", self._path(resource), query)
            items += found["items"]
            if not (following := found["metadata"].get("continue")):
                return items
            query["continue"] = following

    def create(self, resource: str, body: Object, *, dry_run: bool = False) -> Object:
        """Create the object, and return it as it is stored. Unknown fields are refused."""
        query = _WRITER | ({"dryRun": "All"} if dry_run else {})
        return self._request("POST", self._path(resource), query, body)

    def merge(self, resource: str, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch, and return the object."""
        return self._request("PATCH", self._path(resource, name), _WRITER, patch, _MERGE_PATCH)

    def delete(self, resource: str, name: str, *, grace_seconds: int | None = None) -> None:
        options: Object = {"propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        self._request("DELETE", self._path(resource, name), None, options)

    def changes(
        self, resource: str, *, name: str | None = None, known: Sequence[Object] = (), seconds: float | None = None
    ) -> Iterator[tuple[str, Object]]:
        """The present objects, then each change of one, as type (ADDED, MODIFIED, DELETED) and object.

        `known`: objects that are DELETED if they do not exist any more. Ends after `seconds`. Goes on after an outage
        of the API server of up to two minutes.
        """
        present = {found["metadata"]["uid"]: found for found in known}
        versions: dict[str, str] = {}
        deadline = None if seconds is None else time.monotonic() + seconds
        answered_at = time.monotonic()
        while (left := _seconds_until(deadline)) > 0:
            try:
                for kind, found in self._listed_and_watched(resource, name, present, left):
                    answered_at = time.monotonic()
                    uid, version = found["metadata"]["uid"], found["metadata"]["resourceVersion"]
                    if kind == "DELETED":
                        present.pop(uid, None)
                    elif versions.get(uid) == version:
                        continue
                    else:
                        present[uid] = found
                    versions[uid] = version
                    yield kind, found
                answered_at = time.monotonic()
            except NoCluster:
                if not versions or time.monotonic() > answered_at + _OUTAGE_SECONDS:
                    raise
                time.sleep(min(_RETRY_SECONDS, max(_seconds_until(deadline), 0)))

    def _listed_and_watched(
        self, resource: str, name: str | None, known: Mapping[str, Object], seconds: float
    ) -> Iterator[tuple[str, Object]]:
        """Those of `known` that are gone, the listed objects, and the events of one watch request."""
        query = {} if name is None else {"fieldSelector": f"metadata.name={name}"}
        path = self._path(resource)
        listed = self._request("GET", path, query)
        present = {item["metadata"]["uid"]: item for item in listed["items"]}
        for uid in [uid for uid in known if uid not in present]:
            yield "DELETED", known[uid]
        for item in present.values():
            yield "ADDED", item
        duration = max(int(min(seconds, _WATCH_SECONDS)), 1)
        query |= {"watch": "true", "timeoutSeconds": str(duration)}
        query["resourceVersion"] = listed["metadata"]["resourceVersion"]
        for line in self._lines(path, query, duration + 30.0):
            event = json.loads(line)
            if event["type"] == "ERROR":  # the version is too old: list again
                return
            yield event["type"], event["object"]

    # --- pods ---

    def log(self, pod: str, *, container: str, previous: bool = False, follow: bool = False) -> Iterator[bytes]:
        """Lines of the log of a container."""
        query = {"container": container, "previous": str(previous).lower(), "follow": str(follow).lower()}
        path = f"{self._path('pods', pod)}/log"
        return self._lines(path, query, None if follow else _TIMEOUT[1])

    def execute(self, pod: str, command: Sequence[str]) -> PodCommand:
        """Start a command in the only container of a pod."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        query = [*(("command", word) for word in command), ("stdout", "true"), ("stderr", "true")]
        path = f"{self._path('pods', pod)}/exec"
        _, url, headers, *_ = self._client.param_serialize("GET", path, query_params=query, auth_settings=[_TOKEN])
        headers["sec-websocket-protocol"] = _EXEC_PROTOCOL
        try:
            socket = create_websocket(self._configuration, get_websocket_url(url), headers)
        except WebSocketBadStatusException as error:
            raise refusal(error.status_code, error.resp_body or b"") from None
        except (WebSocketException, OSError) as error:
            raise self._no_answer(error) from None
        return PodCommand(socket)

    # --- requests ---

    def _path(self, resource: str, name: str = "") -> str:
        scope = f"/namespaces/{quote(self.namespace, safe='')}" if self.namespace else ""
        return f"{_ROOTS.get(resource, '/api/v1')}{scope}/{resource}" + (f"/{quote(name, safe='')}" if name else "")

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = _JSON,
    ) -> Object:
        with self._answer(method, path, query or {}, body, content_type) as answer:
            found: Object = json.loads(answer.data)
            return found

    def _lines(self, path: str, query: Mapping[str, str], silent_seconds: float | None) -> Iterator[bytes]:
        with self._answer("GET", path, query, timeout=(_TIMEOUT[0], silent_seconds)) as answer:
            yield from answer

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        content_type: str = _JSON,
        timeout: tuple[float, float | None] = _TIMEOUT,
    ) -> Iterator[Any]:
        """The response of urllib3, within a block in which a lost connection raises NoCluster."""
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        answer = None
        try:
            request = self._client.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params={"Accept": _JSON, "Content-Type": content_type},
                body=body,
                auth_settings=[_TOKEN],
            )
            answer = self._client.call_api(*request, _request_timeout=timeout).response
            if answer.status >= 400:
                raise refusal(answer.status, answer.data)
            for warning in answer.headers.getlist("Warning"):
                warnings.warn(_text_of(warning), stacklevel=2)
            yield answer
        except (HTTPError, OSError, ApiException, ConfigException) as error:
            raise self._no_answer(error) from None
        finally:
            if answer is not None:
                answer.close()

    def _no_answer(self, error: Exception) -> NoCluster:
        reason = (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
        return NoCluster(
            f"expected a cluster that responds at {self._configuration.host}, found: {reason}; start it, or "
            f"{OTHER_CLUSTER}"
        )


_TOKEN = "BearerToken"


class PodCommand:
    """A command that runs in a pod. Its output is read like that of a file; `errors` is complete at its end."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._rest = b""
        self._status = b""
        self.errors = b""
        """Error output so far."""

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the output; empty at its end."""
        while not self._rest and self._receive():
            pass
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def close(self) -> None:
        self._socket.close()

    @property
    def succeeded(self) -> bool:
        """True if the command has ended with code 0."""
        return bool(self._status) and json.loads(self._status).get("status") == "Success"

    @property
    def message(self) -> str:
        """Error output, otherwise the API server's reason of a failure; empty if there is neither."""
        status = json.loads(self._status) if self._status and not self.succeeded else {}
        return self.errors.decode(errors="replace").strip() or str(status.get("message", ""))

    def _receive(self) -> bool:
        """Read one frame; False at the end of the stream."""
        from websocket import ABNF, WebSocketException

        try:
            code, frame = self._socket.recv_data_frame(True)
        except (WebSocketException, OSError):
            return False
        if code == ABNF.OPCODE_CLOSE:
            return False
        if code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
            channel, data = frame.data[0], frame.data[1:]
            self._rest += data if channel == _OUTPUT else b""
            self.errors += data if channel == _ERRORS else b""
            self._status += data if channel == _STATUS else b""
        return True


def _configuration(context: str | None, kubeconfig: str | None) -> tuple[Any, str]:
    """The client's configuration, and its namespace. A pod without a kubeconfig uses its service account."""
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, load_incluster_config
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    configuration = Configuration()
    configuration.retries = False  # urllib3 would log each retry
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        if context is None and not os.path.exists(path) and (_SERVICE_ACCOUNT / "token").exists():
            load_incluster_config(client_configuration=configuration)
            return configuration, (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        loader = KubeConfigLoader(KubeConfigMerger(path).config, active_context=context)
        loader.load_and_set(configuration)
        return configuration, str(loader.current_context["context"].get("namespace") or "default")
    except (ConfigException, OSError, YAMLError, ValueError, TypeError, AttributeError) as error:
        wanted = f"the context {context}" if context else "a current context"
        reason = str(error).partition("\n")[0].rstrip(".")
        raise NoCluster(
            f"expected a kubeconfig with {wanted}, found {path}: {reason}; correct it, set KUBECONFIG, or choose one of "
            "kubectl config get-contexts"
        ) from None


def _seconds_until(deadline: float | None) -> float:
    return float("inf") if deadline is None else deadline - time.monotonic()


def _text_of(warning: str) -> str:
    """`text` of the header `299 - "text"`."""
    _, _, quoted = warning.partition('"')
    return quoted.removesuffix('"').replace('\\"', '"').replace("\\\\", "\\") or warning
