"""The pods of a job as processes on this machine, each with its own folders and ports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rljob_api.memory_plan import MemoryPlan
from rljob_api.termination_message import TerminationMessage, read_termination_message
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_testing.runs import RLJOB

RAY_PORT = 21000
"""The same for all tests, which therefore run in one process (`POD_PROCESSES` in tests/conftest.py)."""
_PORTS_OF_A_POD = 300


@dataclass
class PodProcess:
    """One pod: its process, which is the init process of its children, and its files."""

    directory: Path
    process: subprocess.Popen[bytes]
    temporary: Path
    command: list[str]
    environment: dict[str, str]

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def ready(self) -> bool:
        return (self.directory / "run" / "ready").exists()

    @property
    def termination_message(self) -> TerminationMessage:
        message = read_termination_message((self.directory / "termination-log").read_text())
        assert message is not None
        return message

    def wait(self) -> int:
        deadline = Deadline(PATIENCE_SECONDS)
        while (exit_code := self.process.poll()) is None:
            assert not deadline.passed, f"{self.directory.name} has not ended:\n{self.log}"
            time.sleep(0.05)
        return exit_code

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """All processes of the pod at once, as when its node is gone."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            processes: list[psutil.Process | subprocess.Popen[bytes]] = [*children, self.process]
            for process in processes:
                with suppress(psutil.NoSuchProcess):  # the pod may be ending by itself
                    process.kill()
            self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


@dataclass
class Pods:
    """Creates the pods of one attempt after another. `variables`: environment of the controller's pod beyond the
    contract."""

    directory: Path
    manifest: Path
    workers: int
    variables: dict[str, str] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    rollouts: int = 0
    """Number of workers with engines; the others have policy ranks."""
    of_workers: dict[str, str] = field(default_factory=dict)
    """Further variables of the workers' pods."""

    @property
    def output(self) -> Path:
        return self.directory / "volume"

    def start(self, attempt: int) -> PodsOfAttempt:
        self.output.mkdir(exist_ok=True)
        settings = self.directory / "attempt.json"
        plan = self.plan.model_dump(mode="json", by_alias=True) if self.plan else None
        settings.write_text(json.dumps({"attempt": attempt, "memoryPlan": plan}))
        variables = {
            "RLJOB_ATTEMPT": str(attempt),
            "RLJOB_PLAN_GENERATION": str(self.plan.generation if self.plan else 1),
            "RLJOB_ATTEMPT_SETTINGS": str(settings),
        }
        policy = self.workers - self.rollouts
        places = [("policy", index) for index in range(policy)] + [("rollout", index) for index in range(self.rollouts)]
        workers = [
            self._pod(
                f"{role}-{index}",
                1 + number,
                ["worker"],
                variables | {"RLJOB_ROLE": role, "RLJOB_INDEX": str(index)} | self.of_workers,
            )
            for number, (role, index) in enumerate(places)
        ]
        controller = self._pod("controller", 0, ["controller"], variables | self.variables)
        return PodsOfAttempt(controller, workers, self.output / "ledger.jsonl")

    def start_again(self, pod: PodProcess) -> PodProcess:
        """The successor of a pod that is gone, in the same attempt and with the same name."""
        directory = pod.directory.with_name(f"{pod.directory.name}-again")
        environment = pod.environment | _places(directory)
        return _started(directory, pod.command, environment)

    def _pod(self, name: str, number: int, command: list[str], variables: dict[str, str]) -> PodProcess:
        directory = self.directory / f"{name}-{variables['RLJOB_ATTEMPT']}"
        address = _own_address()
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "RLJOB_NAME": "digits",
            "RLJOB_NAMESPACE": "default",
            "RLJOB_WORKERS": str(self.workers),
            "RLJOB_MANIFEST": str(self.manifest),
            "RLJOB_OUTPUT": str(self.output),
            "RLJOB_RAY_HEAD": f"{address}:{RAY_PORT}",
            "RLJOB_RAY_FIRST_PORT": str(RAY_PORT + 10 + number * _PORTS_OF_A_POD),
            "POD_IP": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
            # All pods find the model at one path; here it is also one directory.
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "OMP_NUM_THREADS": "1",
            **_places(directory),
            **variables,
        }
        return _started(directory, command, environment)


def _places(directory: Path) -> dict[str, str]:
    """Variables with the places that a pod may write to."""
    return {
        "RLJOB_RUN_DIR": str(directory / "run"),
        "RLJOB_TERMINATION_LOG": str(directory / "termination-log"),
        "HOME": str(directory / "home"),
    }


def _started(directory: Path, command: list[str], environment: dict[str, str]) -> PodProcess:
    for folder in ("run", "home"):
        (directory / folder).mkdir(parents=True)
    # Ray keeps sockets there, whose paths must be short.
    temporary = Path(tempfile.mkdtemp(prefix="pod-"))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [RLJOB, *command], env=environment | {"TMPDIR": str(temporary)}, stdout=log, stderr=log
        )
    return PodProcess(directory, process, temporary, command, environment)


@dataclass
class PodsOfAttempt:
    controller: PodProcess
    workers: list[PodProcess]
    ledger: Path

    def committed(self) -> list[dict[str, Any]]:
        if not self.ledger.exists():
            return []
        whole_lines = self.ledger.read_text().rpartition("\n")[0].splitlines()
        return [record for record in map(json.loads, whole_lines) if record["kind"] == "step"]

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.committed()) >= step, f"step {step}")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = Deadline(PATIENCE_SECONDS)
        while True:
            # Looked at first: what a pod did before it ended counts.
            ended = [pod.directory.name for pod in (self.controller, *self.workers) if pod.process.poll() is not None]
            if holds():
                return
            assert not ended, f"{ended} ended before {what}:\n{self.logs}"
            assert not deadline.passed, f"{what} did not come:\n{self.logs}"
            time.sleep(0.02)

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {pod.directory.name}\n{pod.log}" for pod in (self.controller, *self.workers))

    def kill(self) -> None:
        for pod in (self.controller, *self.workers):
            pod.kill()


def _own_address() -> str:
    """This machine's address, which Ray uses regardless of its options. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
