"""The real operator as a process that tests and benchmarks start, kill and restart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from rljob_testing.operator.api_client import RequestRefused, ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy, RecordedRequest
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import EFFECT_SECONDS, PATIENCE_SECONDS, Deadline

START_SECONDS = 120.0
_LEADERSHIP_LOST = "leadership lost, exiting"


@dataclass
class OperatorProcess:
    """One replica, with its log and its ports. `settings` are options of `rljob-operator run`, by their field names."""

    kubeconfig: Path
    log: Path
    probes_port: int
    metrics_port: int
    settings: Mapping[str, object] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _wanted: bool = False
    """Started, and neither ended nor awaited to end by the test."""
    _changing: threading.Lock = field(default_factory=threading.Lock)
    """Held while the process starts or is killed: `restarts.kept_running` revives it in another thread."""

    def start(self, wait: bool = True) -> None:
        """Return when it is ready: its caches are filled, and it is the leader or a standby."""
        with self._changing:
            assert not self.running, "the operator runs already"
            self._spawn()
            self._wanted = True
        if wait:
            self.wait_ready()

    def revive(self) -> bool:
        """Start it again if it ended because it could not renew its Lease, which happens when the machine is busy. A
        kubelet would restart it after a crash too; here, a crash must fail the test.
        """
        with self._changing:
            if lost := self.lost_its_lease:
                self._spawn()
            return lost

    def _spawn(self) -> None:
        given = {**self.settings, "probes_port": self.probes_port, "metrics_port": self.metrics_port}
        settings = {f"RLJOB_OPERATOR_{name.upper()}": str(value) for name, value in given.items()}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rljob_operator.cli", "run"],
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig), **settings},
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        deadline = Deadline(START_SECONDS)
        while not deadline.passed:
            assert not self.crashed, f"the operator ended with code {self.exit_code}; {self.end_of_log()}"
            if self.probe("readyz") == 200:
                return
            time.sleep(0.05)
        raise AssertionError(f"the operator is not ready after {START_SECONDS} s; {self.end_of_log()}")

    def probe(self, path: str) -> int:
        """HTTP status of /healthz or /readyz; 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.probes_port}/{path}", timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def lost_its_lease(self) -> bool:
        """It ended because it could not renew its Lease in time, and no test expected that."""
        return self._wanted and not self.running and _LEADERSHIP_LOST in self.end_of_log(lines=3)

    @property
    def crashed(self) -> bool:
        """It ended for another reason than its Lease, or was never started."""
        with self._changing:
            return not self.running and not self.lost_its_lease

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL; the Lease is not released. Returns when the process is dead."""
        with self._changing:
            assert self._process is not None
            self._wanted = False
            self._process.kill()
            self._process.wait()

    def wait_ended(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Its exit code. AssertionError if it does not end."""
        self._wanted = False
        deadline = Deadline(timeout)
        while self.running:
            assert not deadline.passed, f"the operator has not ended after {timeout:g} s; {self.end_of_log()}"
            time.sleep(0.05)
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM, as a kubelet does; returns the exit code."""
        with self._changing:
            assert self._process is not None
            self._wanted = False
            self._process.terminate()
        return self.wait_ended()

    @property
    def process(self) -> psutil.Process:
        """For measurements."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def cpu_seconds(self) -> float:
        """User and system time since the start."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def end_of_log(self, lines: int = 15) -> str:
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"its log {self.log} ends:\n" + "\n".join(tail)


def write_kubeconfig(path: Path, url: str, token: str, ca: Path | None = None) -> Path:
    """Write a kubeconfig for a token. `ca`: None if `url` is plain HTTP."""
    cluster = {"server": url} | ({} if ca is None else {"certificate-authority": str(ca)})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "operator"}}],
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "operator", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


BLOCK = 24
_FIRST, _LAST = 24000, 26000


@contextmanager
def port_block() -> Iterator[int]:
    """The first of 24 free ports in a row. The last one is held, so no other session takes the same block."""
    for base in range(_FIRST, _LAST, BLOCK):
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", base + BLOCK - 1))
            except OSError:
                continue
            if all(_is_free(port) for port in range(base, base + BLOCK - 1)):
                yield base
                return
    raise OSError(f"no {BLOCK} free ports in a row between {_FIRST} and {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# Kills and restarts of the operator.

OPERATOR_NAMESPACE = "rljob-system"
KILLED_EFFECT_SECONDS = 3 * EFFECT_SECONDS
"""Limit for one effect of an operator that is killed after each change: it starts a dozen times before."""


def forget_leader(api: ResourceClient, namespace: str = OPERATOR_NAMESPACE) -> None:
    """Delete the Lease of a killed leader, which would block other replicas for 15 s."""
    for lease in api.list("leases", namespace):
        try:
            api.delete("leases", lease["metadata"]["name"], namespace)
        except RequestRefused as error:
            if error.status != 404:  # `kept_running` deletes it too
                raise


def restart(operator: OperatorProcess, api: ResourceClient) -> None:
    """Kill the operator and start it again."""
    operator.kill()
    forget_leader(api)
    operator.start()


@contextmanager
def kept_running(operator: OperatorProcess, api: ResourceClient, namespace: str = OPERATOR_NAMESPACE) -> Iterator[None]:
    """Restart the operator if it loses its Lease, as a kubelet would: an API server that shares two busy cores with all
    other tests may not answer for 10 s.
    """
    done = threading.Event()

    def keep() -> None:
        while not done.wait(0.2):
            if operator.lost_its_lease:
                with suppress(httpx.TransportError, RequestRefused):  # the API server may be away, or starting
                    forget_leader(api, namespace)
                    operator.revive()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


@contextmanager
def killed_after_each_change(operator: OperatorProcess, proxy: FaultProxy, api: ResourceClient) -> Iterator[list[str]]:
    """Within the block, kill the operator after each change that it makes, and restart it. Yields those changes."""
    kills: list[str] = []
    stopping = threading.Event()

    def kill(change: RecordedRequest) -> None:
        if operator.running:  # a dead process's last writes may come after it
            operator.kill()
            kills.append(str(change))

    def revive() -> None:
        while not stopping.wait(0.02):
            if operator.crashed:  # and not if it lost its Lease: `kept_running` starts it again
                forget_leader(api)
                operator.start(wait=False)

    proxy.after_each_change(kill)
    reviver = threading.Thread(target=revive)
    reviver.start()
    try:
        yield kills
    finally:
        proxy.after_each_change(None)
        stopping.set()
        reviver.join()
        if operator.crashed:
            forget_leader(api)
            operator.start(wait=False)
        operator.wait_ready()


def outcome(job: WatchedJob) -> dict[str, Any]:
    """Fields of the status that do not depend on the time of a kill: no times, no names."""
    status = job.status
    return {
        "conditions": {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]},
        "attempts": [(a["fromStep"], a.get("toStep"), a.get("reason")) for a in status["attempts"]],
        "steps": (status["step"], status["steps"], status.get("restarts", 0)),
        "plan": status["plan"],
        "pods": sorted(name.removeprefix(job.name) for name in job.pods),
        "phase": job.phase,
    }
