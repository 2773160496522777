"""`rljob fetch`: a reader pod, a tar stream out of it, and the files on this machine."""

from __future__ import annotations

import secrets
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from rljob_api.checkpoint import CheckpointSpec
from rljob_api.metadata import JOB_NAME_LABEL, checkpoint_claim_name
from rljob_client.api_errors import KubernetesError, ObjectMissing
from rljob_client.api_server import ApiServer, Object
from rljob_client.errors import OutputUnavailable
from rljob_client.model_files import ADAPTER, is_model, require_whole
from rljob_client.run_directory.durable_files import require_free
from rljob_memory.sizes import human_bytes

Read = Callable[[int], bytes]
"""Returns at most that many bytes; none at the end."""

_START_SECONDS = 300.0


def fetch(
    api: ApiServer, job: str, path: str, output: Path | None, *, image: str | None = None, print_pod: bool = False
) -> None:
    """Run the command. `output`: None for runs/JOB/PATH. `print_pod`: only print the manifest of the reader pod."""
    if print_pod:
        print(yaml.safe_dump(_pod(api, _run_files(api, job), image), sort_keys=False), end="")
        return
    output = output or Path("runs", job, path)
    size = fetch_files(api, job, path, output, image=image)
    print(f"{human_bytes(size)} in {output}")


def fetch_files(
    api: ApiServer, job: str, path: str, output: Path, *, image: str | None = None, without: Sequence[str] = ()
) -> int:
    """Copy a file or directory `path` of the run (`.`: all of it) to `output`, and return the bytes of its files.

    `without`: directories of the run to leave out. `image`: that of the reader pod, by default that of the job's pods.
    Raises KubernetesError and OutputUnavailable; BadInput if a fetched model is damaged.
    """
    path = _checked(path)
    require_free(output)
    files = _run_files(api, job)
    pod = _pod(api, files, image)
    name = pod["metadata"]["name"]
    api.create("pods", pod)
    try:
        _wait_until_ready(api, name)
        size = _stream(api, name, files, path, output, without)
    finally:
        try:
            api.delete("pods", name, gracePeriodSeconds=0)
        except ObjectMissing:
            pass
        except KubernetesError as error:  # it must not replace the failure that is being reported
            print(f"rljob: pod {name} was not deleted: {error}", file=sys.stderr)
    if is_model(path) and not (output / ADAPTER).is_file():
        require_whole(output)
    return size


def _checked(path: str) -> str:
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise KubernetesError(f"--path: expected a directory of the run, such as model or logs, found {path}")
    return "/".join(parts) or "."


def _run_files(api: ApiServer, name: str) -> RunFiles:
    """Raises ObjectMissing if there is neither the job nor a claim that it left."""
    job = api.find("rljobs", name)
    if job is not None:
        given: dict[str, Any] = job["spec"].get("checkpoint") or {}
        return RunFiles.of(name, CheckpointSpec.model_validate(given, by_alias=True, by_name=False))
    if api.find("persistentvolumeclaims", checkpoint_claim_name(name)) is not None:
        return RunFiles.of(name, CheckpointSpec(retain=True))
    raise ObjectMissing(
        f"expected an RLJob {name}, or the claim {checkpoint_claim_name(name)} of one with checkpoint.retain, found "
        "neither; name its namespace with -n"
    )


def _pod(api: ApiServer, files: RunFiles, image: str | None) -> Object:
    of_job = next(iter(api.list("pods", labelSelector=f"{JOB_NAME_LABEL}={files.job}")), None)  # the controller's
    if image is None and of_job is None:
        raise ObjectMissing(
            "the pods of the job are gone: name an image with tar and sleep (--image, Job.reader_image)"
        )
    name = f"{files.job}-fetch-{secrets.token_hex(3)}"
    return reader_pod(files, name, image or image_of(of_job or {}), of_job)


def _wait_until_ready(api: ApiServer, name: str) -> None:
    pod = None
    for kind, pod in api.changes("pods", name=name, seconds=_START_SECONDS):
        if kind == "DELETED":
            raise ObjectMissing(f"pod {name} was deleted")
        if is_ready(pod):
            return
    why = start_obstacle(pod or {}) or f"see kubectl describe pod {name}"
    raise KubernetesError(f"pod {name} has not started after {_START_SECONDS:.0f} s: {why}")


def _stream(api: ApiServer, pod: str, files: RunFiles, path: str, output: Path, without: Sequence[str]) -> int:
    left_out = ("./.model-cache", ".compile-cache", *(f"./{name}" for name in without))
    excluded = [f"--exclude={name}" for name in left_out]
    command = api.execute(pod, ["tar", "-C", files.mounted, *excluded, "-cf", "-", path])
    try:
        size = extract(command.read, path, output)
        problem = None
    except IncompleteArchive as error:
        size, problem = 0, str(error)
    finally:
        command.close()
    # A running job writes to its files, of which the archive has the state at their start.
    failure = None if _CHANGED in (command.failure or "") else command.failure
    if not (problem or failure):
        return size
    shutil.rmtree(output, ignore_errors=True)
    if "No such file" in (failure or ""):
        raise ObjectMissing(_absent(path, files))
    raise KubernetesError(f"cannot fetch {path} of {files.job}: {failure or problem}")


_CHANGED = "file changed as we read it"
"""Warning of GNU tar, which then ends with code 1."""


def _absent(path: str, files: RunFiles) -> str:
    written = ""
    if is_model(path):
        written = (
            ": model/ is written after the last step, best/ with evaluation.keepBest, and models/ with "
            "checkpoint.exportEverySteps"
        )
    return f"the run of {files.job} has no {path}{written}; --path checkpoints fetches the checkpoints"


_END = bytes(1024)
"""Every complete archive ends with two blocks of zeros. A stream that was cut between two files has none."""


class IncompleteArchive(Exception):
    """The stream ended early, or is not an archive."""


class _Tail:
    """A stream that remembers its last bytes."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.last = b""

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self.last = (self.last + data)[-len(_END) :]
        return data


def extract(read: Read, name: str, directory: Path) -> int:
    """Extract the file or directory `name` of the archive (`.`: all of it) as `directory`, and return the bytes of its
    files.

    `directory` exists only if the archive was complete. Raises IncompleteArchive and OutputUnavailable. Links and
    paths out of the directory are refused (PEP 706).
    """
    partial = directory.with_name(f"{directory.name}.partial")
    size = 0
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tail = _Tail(read)
        with tarfile.open(fileobj=tail, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.extract(member, partial, filter="data")
                size += member.size
        while tail.read(1 << 16):
            pass
        if tail.last != _END:
            raise IncompleteArchive("the stream ended early")
        source = partial if name == "." else partial / name
        if not source.exists():
            raise IncompleteArchive(f"it has no {name}")
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
