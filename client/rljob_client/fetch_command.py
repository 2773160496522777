"""`rljob fetch`: a reader pod, a tar stream through `kubectl exec`, and the files on this machine."""

from __future__ import annotations

import secrets
import shutil
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import yaml

from rljob_api.checkpoint import CheckpointSpec
from rljob_api.exit_codes import ExitCode
from rljob_api.metadata import checkpoint_claim_name
from rljob_client.errors import OutputUnavailable, RunError
from rljob_client.kubectl import Kubectl, KubectlError, explain_failure
from rljob_client.model_files import require_whole
from rljob_memory.sizes import human_bytes

_START_SECONDS = 300.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Options of the command line."""

    job: str

    path: str = "model"
    """Directory of the run to fetch."""

    output: Path | None = None
    """None: runs/JOB/PATH."""

    namespace: str | None = None

    context: str | None = None

    image: str | None = None
    """Image of the reader pod; None: that of the job's pods."""

    print_pod: bool = False
    """Print the manifest of the reader pod instead."""


def fetch(options: FetchOptions) -> ExitCode:
    """Fetch the files, print where they are, and return the exit code."""
    kubectl = Kubectl(options.context, options.namespace)
    try:
        path = _checked_path(options.path)
        files = _run_files(kubectl, options.job)
        pod = _pod(kubectl, files, options.image)
        if options.print_pod:
            print(yaml.safe_dump(pod, sort_keys=False), end="")
            return ExitCode.COMPLETE
        output = options.output or Path("runs", options.job, path)
        require_free(output)
        _copy(kubectl, pod, files, path, output)
    except RunError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.COMPLETE


def _checked_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise KubectlError(f"--path: expected a directory of the run, such as model or logs, found {path}")
    return "/".join(parts) or "."


def _run_files(kubectl: Kubectl, name: str) -> RunFiles:
    """Raises ClusterError if there is neither the job nor a claim that it left."""
    job = kubectl.find("rljob", name)
    if job is not None:
        given: dict[str, Any] = job["spec"].get("checkpoint") or {}
        return RunFiles.of(name, CheckpointSpec.model_validate(given, by_alias=True, by_name=False))
    if kubectl.find("persistentvolumeclaim", checkpoint_claim_name(name)) is not None:
        return RunFiles.of(name, CheckpointSpec(retain=True))
    raise KubectlError(
        f"expected an RLJob {name}, or the claim {checkpoint_claim_name(name)} of one with checkpoint.retain, found "
        "neither; name its namespace with -n"
    )


def _pod(kubectl: Kubectl, files: RunFiles, image: str | None) -> dict[str, Any]:
    of_job = kubectl.find("pod", f"{files.job}-controller") or kubectl.find("pod", f"{files.job}-policy-0")
    if image is None and of_job is None:
        raise KubectlError("the pods of the job are gone: name an image with tar and sleep by --image")
    name = f"{files.job}-fetch-{secrets.token_hex(3)}"
    return reader_pod(files, name, image or image_of(of_job or {}), of_job)


def _copy(kubectl: Kubectl, pod: dict[str, Any], files: RunFiles, path: str, output: Path) -> None:
    name = pod["metadata"]["name"]
    kubectl.run("create", "-f", "-", stdin=yaml.safe_dump(pod))
    try:
        _wait_until_ready(kubectl, name)
        print(f"fetching {path} of {files.job}", flush=True)
        size = _stream(kubectl, name, files, path, output)
    finally:
        try:
            kubectl.run("delete", "pod", name, "--ignore-not-found", "--now", "--wait=false")
        except KubectlError as error:  # it must not replace the failure that is being reported
            print(f"rljob: pod {name} was not deleted: {error}", file=sys.stderr)
    if path == "model":
        require_whole(output)
    print(f"{human_bytes(size)} in {output}")


def _wait_until_ready(kubectl: Kubectl, name: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        pod = kubectl.find("pod", name)
        if pod is None:
            raise KubectlError(f"pod {name} was deleted")
        if is_ready(pod):
            return
        if time.monotonic() > deadline:
            why = start_obstacle(pod) or f"see kubectl describe pod {name}"
            raise KubectlError(f"pod {name} has not started after {_START_SECONDS:.0f} s: {why}")
        time.sleep(_POLL_SECONDS)


def _stream(kubectl: Kubectl, pod: str, files: RunFiles, path: str, output: Path) -> int:
    with tempfile.TemporaryFile() as errors:
        caches = ("--exclude=./.model-cache", "--exclude=.compile-cache")
        command = ("exec", pod, "--", "tar", "-C", files.mounted, *caches, "-cf", "-", path)
        with kubectl.stream(*command, errors=errors) as process:
            assert process.stdout is not None
            try:
                size = extract(process.stdout, path, output)
                problem = None
            except IncompleteArchive as error:
                process.stdout.close()
                size, problem = 0, str(error)
        if problem is None and process.returncode == 0:
            return size
        errors.seek(0)
        stderr = errors.read().decode(errors="replace").strip()
    shutil.rmtree(output, ignore_errors=True)
    if "No such file" in stderr:
        raise KubectlError(_absent(path, files))
    why = explain_failure(f"exec {pod}", stderr) if stderr else problem
    raise KubectlError(f"cannot fetch {path} of {files.job}: {why}")


def _absent(path: str, files: RunFiles) -> str:
    written = ": it is written after the last step" if path == "model" else ""
    return f"the run of {files.job} has no {path}{written}; --path checkpoints fetches the checkpoints"


_END = bytes(1024)
"""Every complete archive ends with two blocks of zeros. A stream that was cut between two files has none."""


class IncompleteArchive(Exception):
    """The stream ended early, or is not an archive."""


class _Tail:
    """A stream that remembers its last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.last = (self.last + data)[-len(_END) :]
        return data


def require_free(directory: Path) -> None:
    """Raise OutputUnavailable unless `directory` does not exist or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OutputUnavailable(
            f"expected no directory {directory}, or an empty one, found files; give another --output"
        )


def extract(stream: IO[bytes], name: str, directory: Path) -> int:
    """Extract the directory `name` of the archive (`.`: all of it) as `directory`, and return the bytes of its files.

    `directory` exists only if the archive was complete. Raises IncompleteArchive and OutputUnavailable. Links and
    paths out of the directory are refused (PEP 706).
    """
    partial = directory.with_name(f"{directory.name}.partial")
    size = 0
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tail = _Tail(stream)
        with tarfile.open(fileobj=tail, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.extract(member, partial, filter="data")
                size += member.size
        while tail.read(1 << 16):
            pass
        if tail.last != _END:
            raise IncompleteArchive("the stream ended early")
        source = partial if name == "." else partial / name
        if not source.is_dir():
            raise IncompleteArchive(f"it has no directory {name}")
        if directory.exists():
            directory.rmdir()
        source.rename(directory)
    except tarfile.TarError as error:
        raise IncompleteArchive(str(error)) from error
    except OSError as error:
        raise OutputUnavailable(f"cannot write {directory}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


Object = dict[str, Any]

CONTAINER = "fetch"
MOUNT = "/run-files"
_LIFETIME_SECONDS = 6 * 3600
"""The pod ends after this time even if nobody deletes it."""
_USER = 10001
"""The user of RLJob's images, which owns the files."""
_COPIED_FROM_SPEC = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "securityContext")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run in a cluster."""

    job: str

    volume: Object
    """Kubernetes volume source."""

    directory: str
    """Directory of the run on the volume; empty for its root."""

    @classmethod
    def of(cls, job: str, checkpoint: CheckpointSpec) -> RunFiles:
        """The files of a job with this `spec.checkpoint`."""
        return cls(job, checkpoint.volume_source(job), checkpoint.directory(job))

    @property
    def mounted(self) -> str:
        """Path of the run's directory in the reader pod."""
        return f"{MOUNT}/{self.directory}".rstrip("/")


def reader_pod(files: RunFiles, name: str, image: str, model_pod: Object | None) -> Object:
    """A pod of Pod Security `restricted` with the volume of the run, read-only.

    `image`: any with tar and sleep. `model_pod`: a pod of the job, whose placement and security context are copied.
    """
    spec: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIFETIME_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    copied = model_pod["spec"] if model_pod else {}
    spec |= {field: copied[field] for field in _COPIED_FROM_SPEC if field in copied}
    spec["containers"] = [
        {
            "name": CONTAINER,
            "image": image,
            "command": ["sleep", str(_LIFETIME_SECONDS)],
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [{"name": "run", "mountPath": MOUNT, "readOnly": True}],
        }
    ]
    spec["volumes"] = [{"name": "run", **files.volume}]
    labels = {"app.kubernetes.io/name": "rljob-fetch"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def image_of(pod: Object) -> str:
    """Image of the container `rljob` of a pod of a job."""
    return next(str(c["image"]) for c in pod["spec"]["containers"] if c["name"] == "rljob")


def start_obstacle(pod: Object) -> str | None:
    """Reason why the pod does not start; None if it may start soon."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("reason") == "Unschedulable":
            return str(condition.get("message"))
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".removesuffix(": ")
    return None


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
