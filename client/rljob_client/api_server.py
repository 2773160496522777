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
Query = Mapping[str, str]

_ROOTS = {"rljobs": f"/apis/{API_VERSION}", "stepreports": f"/apis/{API_VERSION}", "rayjobs": "/apis/ray.io/v1"}
"""API of a resource; by default the core API."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN = ["BearerToken"]
_JSON, _MERGE_PATCH = "application/json", "application/merge-patch+json"
_NONE: Query = {}
_WRITER = {"fieldValidation": "Strict", "fieldManager": "rljob-client"}
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 60.0
_WATCH_SECONDS = 240.0
"""Duration of one watch request, after which the objects are listed again."""
_OUTAGE_SECONDS = 120.0
"""Longest outage of the API server that a watch survives."""
_RETRY_SECONDS = 2.0
_OUTPUT, _ERRORS, _STATUS = 1, 2, 3
"""Channels of the protocol v4.channel.k8s.io."""


class ApiServer:
    """One identity at one API server, in one namespace; in all if it is empty.

    Methods raise subclasses of KubernetesError.
    """

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
        return self._request("GET", self._path(resource, name))

    def find(self, resource: str, name: str) -> Object | None:
        """The object; None if it does not exist."""
        try:
            return self.get(resource, name)
        except ObjectMissing:
            return None

    def list(self, resource: str, **selectors: str) -> list[Object]:
        """The objects that `labelSelector` or `fieldSelector` select."""
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
        return self._request("POST", self._path(resource), _WRITER | ({"dryRun": "All"} if dry_run else {}), body)

    def merge(self, resource: str, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch, and return the object."""
        return self._request("PATCH", self._path(resource, name), _WRITER, patch, _MERGE_PATCH)

    def delete(self, resource: str, name: str, **options: int) -> None:
        self._request("DELETE", self._path(resource, name), _NONE, {"propagationPolicy": "Background", **options})

    def changes(
        self, resource: str, *, name: str | None = None, known: Sequence[Object] = (), seconds: float | None = None
    ) -> Iterator[tuple[str, Object]]:
        """The present objects, then each change of one, as type (ADDED, MODIFIED, DELETED) and object.

        `known`: objects that are DELETED if they do not exist any more. Ends after `seconds`. Goes on after an outage
        of the API server of up to two minutes.
        """
        present = {found["metadata"]["uid"]: found for found in known}
        versions: dict[str, str] = {}
        started = answered = time.monotonic()
        while (left := float("inf") if seconds is None else started + seconds - time.monotonic()) > 0:
            try:
                for kind, found in self._listed_and_watched(resource, name, present, left):
                    uid, version = found["metadata"]["uid"], found["metadata"]["resourceVersion"]
                    if kind == "DELETED":
                        present.pop(uid, None)
                    elif versions.get(uid) == version:
                        continue
                    else:
                        present[uid] = found
                    versions[uid] = version
                    yield kind, found
                answered = time.monotonic()
            except NoCluster:
                if not versions or time.monotonic() > answered + _WATCH_SECONDS + _OUTAGE_SECONDS:
                    raise
                time.sleep(min(_RETRY_SECONDS, left))

    def _listed_and_watched(
        self, resource: str, name: str | None, known: Mapping[str, Object], seconds: float
    ) -> Iterator[tuple[str, Object]]:
        """Those of `known` that are gone, the listed objects, and the events of one watch request."""
        query = {} if name is None else {"fieldSelector": f"metadata.name={name}"}
        listed = self._request("GET", self._path(resource), query)
        present = {item["metadata"]["uid"]: item for item in listed["items"]}
        yield from [("DELETED", known[uid]) for uid in known if uid not in present]
        yield from (("ADDED", item) for item in present.values())
        duration = max(int(min(seconds, _WATCH_SECONDS)), 1)
        query |= {"watch": "true", "timeoutSeconds": f"{duration}"}
        query["resourceVersion"] = listed["metadata"]["resourceVersion"]
        for event in map(json.loads, self._lines(self._path(resource), query, duration + 30.0)):
            if event["type"] == "ERROR":  # the version is too old: list again
                return
            yield event["type"], event["object"]

    # --- pods ---

    def log(self, pod: str, *, container: str, previous: bool = False, follow: bool = False) -> Iterator[bytes]:
        """Lines of the log of a container."""
        query = {"container": container, "previous": f"{previous}".lower(), "follow": f"{follow}".lower()}
        return self._lines(f"{self._path('pods', pod)}/log", query, None if follow else _READ_SECONDS)

    def execute(self, pod: str, command: Sequence[str]) -> PodCommand:
        """Start a command in the only container of a pod."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        query = [*(("command", word) for word in command), ("stdout", "true"), ("stderr", "true")]
        path = f"{self._path('pods', pod)}/exec"
        _, url, headers, *_ = self._client.param_serialize("GET", path, query_params=query, auth_settings=_TOKEN)
        headers["sec-websocket-protocol"] = "v4.channel.k8s.io"
        try:
            return PodCommand(create_websocket(self._configuration, get_websocket_url(url), headers))
        except WebSocketBadStatusException as error:
            raise refusal(error.status_code, error.resp_body or b"") from None
        except (WebSocketException, OSError) as error:
            raise self._no_answer(error) from None

    # --- requests ---

    def _path(self, resource: str, name: str = "") -> str:
        scope = f"/namespaces/{quote(self.namespace, safe='')}" if self.namespace else ""
        return f"{_ROOTS.get(resource, '/api/v1')}{scope}/{resource}" + (f"/{quote(name, safe='')}" if name else "")

    def _request(self, verb: str, path: str, query: Query = _NONE, body: Any = None, kind: str = _JSON) -> Object:
        with self._answer(verb, path, query, _READ_SECONDS, {"Accept": _JSON, "Content-Type": kind}, body) as answer:
            found: Object = json.loads(answer.data)
            return found

    def _lines(self, path: str, query: Query, silent_seconds: float | None) -> Iterator[bytes]:
        with self._answer("GET", path, query, silent_seconds) as answer:
            yield from answer

    @contextmanager
    def _answer(
        self, verb: str, path: str, query: Query, silent_seconds: float | None, headers: Query = _NONE, body: Any = None
    ) -> Iterator[Any]:
        """The response of urllib3, within a block in which a lost connection raises NoCluster."""
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        parameters = {"query_params": [*query.items()], "header_params": {**headers}, "auth_settings": _TOKEN}
        answer = None
        try:
            request = self._client.param_serialize(verb, path, body=body, **parameters)
            answer = self._client.call_api(*request, _request_timeout=(_CONNECT_SECONDS, silent_seconds)).response
            if answer.status >= 400:
                raise refusal(answer.status, answer.data)
            for warning in answer.headers.getlist("Warning"):  # 299 - "text"
                warnings.warn(warning.partition('"')[2].removesuffix('"').replace('\\"', '"'), stacklevel=6)
            yield answer
        except (HTTPError, OSError, ApiException, ConfigException) as error:
            raise self._no_answer(error) from None
        finally:
            if answer is not None:
                answer.close()

    def _no_answer(self, error: Exception) -> NoCluster:
        found = f"found at {self._configuration.host}: {_first_line(error)}"
        return NoCluster(f"expected a cluster that responds, {found}; start it, or {OTHER_CLUSTER}")


class PodCommand:
    """A command that runs in a pod. Its output is read like that of a file."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._received = {_OUTPUT: b"", _ERRORS: b"", _STATUS: b""}
        self.close = socket.close

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the output; empty at its end."""
        while not self._received[_OUTPUT] and self._receive():
            pass
        data = self._received[_OUTPUT]
        self._received[_OUTPUT] = data[size:]
        return data[:size]

    @property
    def failure(self) -> str | None:
        """Error output of a command that has failed, or the reason; None if it has ended with code 0."""
        if not self._received[_STATUS]:
            return "the connection was lost"
        status = json.loads(self._received[_STATUS])
        errors = self._received[_ERRORS].decode(errors="replace").strip()
        return None if status["status"] == "Success" else errors or str(status.get("message"))

    def _receive(self) -> bool:
        """Read one frame; False at the end of the stream."""
        from websocket import ABNF, WebSocketException

        try:
            code, frame = self._socket.recv_data_frame(True)
        except (WebSocketException, OSError):
            return False
        if code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
            self._received[frame.data[0]] += frame.data[1:]
        return bool(code != ABNF.OPCODE_CLOSE)


def _configuration(context: str | None, kubeconfig: str | None) -> tuple[Any, str]:
    """The client's configuration, and its namespace. A pod without a kubeconfig uses its service account."""
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, load_incluster_config
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    configuration = Configuration()
    configuration.retries = False  # urllib3 would log each retry
    configuration.keep_alive = True
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
        found = f"expected a kubeconfig with {wanted}, found {path}: {_first_line(error)}"
        raise NoCluster(f"{found}; correct it, set KUBECONFIG, or see kubectl config get-contexts") from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
