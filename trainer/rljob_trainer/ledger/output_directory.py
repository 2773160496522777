"""The directory of one run: where everything lies, that one run at a time writes there, and that it stays one job's."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.ledger.durable_files import write_atomically, writing

_IDENTITY_NAME = ".identity.json"
_LOCK_NAME = ".lock"
_NOT_OF_A_RUN = {_LOCK_NAME, f"{_IDENTITY_NAME}.partial", "lost+found", ".snapshot"}
"""Names in a directory that no run has used yet: a volume's own, and what a run leaves that died at once."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What file systems answer that have no locks."""
_LOCK_POLL_SECONDS = 1.0


class OutputDirectory:
    """The layout of a run's files. `open` it before writing anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "job.yaml"
        self.ledger = path / "ledger.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.model = path / "model"
        self.memory = path / "memory"
        self.logs = path / "logs"
        self.controller_log = self.logs / "controller.log"

    @contextmanager
    def open(
        self, manifest: str, identity: Mapping[str, Any], *, pod: str | None = None, wait_seconds: float = 0.0
    ) -> Iterator[None]:
        """Hold the directory for this run alone, for the length of the block; the end of the process lets go too.

        `manifest`: the text that `job.yaml` will hold. `identity`: what must not change between the runs of one job,
        JSON values, nested or not.
        Raises `OutputUnavailable` where another run holds the directory, where it holds another job or something else
        than a run, or where it cannot be written.

        `pod`: the pod of this process as `namespace/name`, for whoever finds the directory held. `wait_seconds`: how
        long another run is given to let go; on a shared volume a lock may outlive its holder's node for a while.
        """
        self._create()
        lock = self._lock(pod, wait_seconds)
        try:
            self._claim(json.loads(json.dumps(identity)))
            write_atomically(self.manifest, manifest.encode())
            with writing(self.path):
                for directory in (self.checkpoints, self.journal, self.memory, self.logs):
                    directory.mkdir(exist_ok=True)
            yield
        finally:
            os.close(lock)

    def _create(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise OutputUnavailable(f"{self.path} is a file. Give a directory as --output.")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the lock, so that not even a lock file is left in a directory that is somebody else's.
            foreign = sorted(path.name for path in self.path.iterdir() if path.name not in _NOT_OF_A_RUN)
        if foreign and not (self.path / _IDENTITY_NAME).exists():
            shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise OutputUnavailable(
                f"{self.path} holds something else than a run ({shown}). Give a new or an empty directory as --output."
            )

    def _lock(self, pod: str | None, wait_seconds: float) -> int:
        """The descriptor whose life is the lock's. Children do not inherit it: those of a killed run do not hold it."""
        path = self.path / _LOCK_NAME
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        if pod is not None:
            holder["pod"] = pod
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _take_lock(descriptor, wait_seconds)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            except BlockingIOError:
                held = os.read(descriptor, 4096)
                os.close(descriptor)
                raise OutputUnavailable(self._held_message(held)) from None
            except OSError:
                os.close(descriptor)
                raise
        return descriptor

    def _held_message(self, lock: bytes) -> str:
        try:
            holder = json.loads(lock)
            if pod := holder.get("pod"):
                namespace, _, name = pod.partition("/")
                who, stop = f"pod {pod}", f"stop it (kubectl delete pod --namespace {namespace} {name})"
            else:
                who, stop = f"process {holder['pid']} on {holder['host']}", f"stop it (kill -TERM {holder['pid']})"
            who += f", since {holder['since']}"
        except (ValueError, KeyError, TypeError, AttributeError):
            who, stop = "another process", "stop it"
        return f"{self.path} is in use by another run: {who}. Wait for it to end, {stop}, or give another --output."

    def _claim(self, identity: dict[str, Any]) -> None:
        path = self.path / _IDENTITY_NAME
        if not path.exists():
            write_atomically(path, json.dumps(identity, indent=2).encode())
            return
        try:
            recorded = json.loads(path.read_bytes())
        except ValueError as error:
            raise OutputUnavailable(
                f"{path} is corrupt ({error}). Restore the file from a copy, or give another --output."
            ) from error
        differences = _differences(recorded, identity)
        if differences:
            raise OutputUnavailable(
                f"{self.path} holds the run of another job; these differ:\n"
                + "".join(f"  {difference}\n" for difference in differences)
                + "Set them back to continue that run, or give another --output to start anew."
            )


def _take_lock(descriptor: int, wait_seconds: float) -> None:
    """Raises BlockingIOError where another process still holds the lock after `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError as error:
            # Without locks, what keeps two runs apart is that nobody starts two: the operator sees to it in a cluster.
            if error.errno not in _NO_LOCKS:
                raise
            return


def _differences(recorded: Any, given: Any) -> list[str]:
    """One line a leaf that differs: `algorithm.groupSize: 8 in the run, 4 in the manifest`."""
    before, now = _leaves(recorded), _leaves(given)
    return [
        f"{name}: {_shown(before, name)} in the run, {_shown(now, name)} in the manifest"
        for name in sorted(before.keys() | now.keys())
        if _shown(before, name) != _shown(now, name)
    ]


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {
        name: leaf
        for key, child in value.items()
        for name, leaf in _leaves(child, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _shown(leaves: dict[str, Any], name: str) -> str:
    return json.dumps(leaves[name]) if name in leaves else "not set"
