"""The output directory of a run: its layout, its lock, and the check that it belongs to one job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rljob_client.errors import OutputUnavailable
from rljob_client.model_files import BEST_MODEL
from rljob_client.run_directory.durable_files import write_atomically, writing
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import step_records

_IDENTITY_NAME = ".identity.json"
_INPUTS = "inputs"
"""Key of the digests of the inputs, next to the sections of the manifest."""
_LOCK_NAME = ".lock"
_OTHER_NAMES = {_LOCK_NAME, f"{_IDENTITY_NAME}.partial", "lost+found", ".snapshot", ".model-cache", ".compile-cache"}
"""Names that may exist in an unused directory: those of a volume, and leftovers of a run that died at its start."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks."""
_LOCK_POLL_SECONDS = 1.0


class OutputDirectory:
    """The paths of a run's files. Call `open` before writing any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "job.yaml"
        self.ledger = path / "ledger.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.model = path / "model"
        self.best = path / BEST_MODEL
        self.memory = path / "memory"
        self.logs = path / "logs"
        self.failure = path / ".failure.json"
        self.controller_log = self.logs / "controller.log"

    def exported_models(self) -> int:
        """Number of models on disk, apart from that of the last step."""
        return len(list(self.path.glob("models/step-*"))) + self.best.is_dir()

    @contextmanager
    def open(
        self,
        manifest: str,
        identity: Mapping[str, Any],
        *,
        changeable: Collection[str] = (),
        pod: str | None = None,
        wait_seconds: float = 0.0,
    ) -> Iterator[None]:
        """Lock the directory for this run within the block. The lock also ends with the process.

        `manifest`: text for `job.yaml`. `identity`: JSON values that must not change between the runs of one job, once
        it has committed a step; without those that have their default. `changeable`: names in `identity` that may
        change nevertheless, as dotted paths.
        `pod`: the pod of this process as `namespace/name`, to report to others who find the directory locked.
        `wait_seconds`: time to wait for the lock; on a shared volume it may outlive the node of its holder.

        Raises `OutputUnavailable` if another run has locked the directory, if it contains another job or other files,
        or if it cannot be written.
        """
        self._create()
        lock = self._lock(pod, wait_seconds)
        try:
            self._claim(json.loads(json.dumps(identity)), changeable)
            write_atomically(self.manifest, manifest.encode())
            with writing(self.path):
                for directory in (self.checkpoints, self.journal, self.memory, self.logs):
                    directory.mkdir(exist_ok=True)
            self._require_replaceable_results()
            yield
        finally:
            os.close(lock)

    def _create(self) -> None:
        with writing(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise OutputUnavailable(
                    f"expected a directory as --output, found the file {self.path}; give a directory"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            # Checked before locking, so that no lock file is left in an unrelated directory.
            foreign = sorted(path.name for path in self.path.iterdir() if path.name not in _OTHER_NAMES)
        if foreign and not (self.path / _IDENTITY_NAME).exists():
            shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise OutputUnavailable(
                f"expected an empty directory, or that of a run, found {shown} in {self.path}; give another --output"
            )

    def _require_replaceable_results(self) -> None:
        """Raise `OutputUnavailable` if model or summary of an earlier run could not be replaced at the end."""
        if self.model.is_symlink() or (self.model.exists() and not self.model.is_dir()):
            found = "a symbolic link" if self.model.is_symlink() else "a file"
            raise OutputUnavailable(
                f"expected a directory or nothing at {self.model}, where the trained model is written, found {found}; "
                "remove it, or give another --output"
            )
        with writing(self.summary):
            if self.summary.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with writing(self.model):
            if self.model.exists() and not os.access(self.model, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _lock(self, pod: str | None, wait_seconds: float) -> int:
        """Lock the directory. Closing the returned descriptor unlocks it. Child processes do not inherit it."""
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
                owner, stop = f"pod {pod}", f"stop it (kubectl delete pod --namespace {namespace} {name})"
            else:
                owner, stop = f"process {holder['pid']} on {holder['host']}", f"stop it (kill -TERM {holder['pid']})"
            owner += f", since {holder['since']}"
        except (ValueError, KeyError, TypeError, AttributeError):
            owner, stop = "another process", "stop it"
        return f"{self.path} is in use by another run: {owner}. Wait for it to end, {stop}, or give another --output."

    def _claim(self, identity: dict[str, Any], changeable: Collection[str]) -> None:
        recorded = self._recorded_identity()
        inputs = recorded.pop(_INPUTS, None)
        if recorded and self._is_other_job(_differences(recorded, identity, changeable)):
            self._start_over()
            inputs = None
        self._record_identity(identity if inputs is None else identity | {_INPUTS: inputs})

    @property
    def recorded_inputs(self) -> dict[str, Any] | None:
        """The digests of the inputs that `record_inputs` has written; None if there are none."""
        return self._recorded_identity().get(_INPUTS)

    def record_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Write digests of the run's inputs, which are JSON values, next to its identity."""
        self._record_identity(self._recorded_identity() | {_INPUTS: dict(inputs)})

    def drop_rollouts(self) -> None:
        """Remove the journal of a run without committed steps."""
        with writing(self.path):
            shutil.rmtree(self.journal)
            self.journal.mkdir()

    def _recorded_identity(self) -> dict[str, Any]:
        """Empty if there is none."""
        path = self.path / _IDENTITY_NAME
        try:
            return dict(json.loads(path.read_bytes())) if path.exists() else {}
        except (ValueError, TypeError) as error:
            raise OutputUnavailable(
                f"{path} is corrupt ({error}). Restore the file from a copy, or give another --output."
            ) from error

    def _record_identity(self, identity: Mapping[str, Any]) -> None:
        write_atomically(self.path / _IDENTITY_NAME, json.dumps(identity, indent=2).encode())

    def _is_other_job(self, differences: Sequence[str]) -> bool:
        """Raise `OutputUnavailable` if the directory holds committed steps of another job."""
        if not differences:
            return False
        if step_records(read_ledger(self.ledger).records):
            raise OutputUnavailable(
                f"{self.path} holds the run of another job; these settings differ:\n"
                + "".join(f"  {difference}\n" for difference in differences)
                + "Revert them to resume that run, or give another --output to start over."
            )
        return True

    def _start_over(self) -> None:
        """Remove all but the logs of a run without committed steps."""
        with writing(self.path):
            self.ledger.unlink(missing_ok=True)
            self.failure.unlink(missing_ok=True)
            for directory in (self.journal, self.checkpoints, self.memory, self.best):
                if directory.exists():
                    shutil.rmtree(directory)


def _take_lock(descriptor: int, wait_seconds: float) -> None:
    """Lock the file. Raises BlockingIOError if another process still holds the lock after `wait_seconds`."""
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
            # Without locks, nobody must start two runs: in a cluster, the operator ensures that.
            if error.errno not in _NO_LOCKS:
                raise
            return


def _differences(recorded: Any, given: Any, changeable: Collection[str]) -> list[str]:
    """One line for each other leaf that differs: `algorithm.groupSize: 8 in the run, 4 in the manifest`."""
    before, now = _leaves(recorded), _leaves(given)
    return [
        f"{name}: {_shown(before, name)} in the run, {_shown(now, name)} in the manifest"
        for name in sorted(before.keys() | now.keys())
        if name not in changeable and _shown(before, name) != _shown(now, name)
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
    return json.dumps(leaves[name]) if name in leaves else "the default"
