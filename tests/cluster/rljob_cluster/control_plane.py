"""A control plane without nodes, for tests: etcd and the API server. Starts in seconds and does not need root.

with ControlPlane(tmp_path, base_port=24000, controller_manager=True) as control_plane:
    subprocess.run(["kubectl", "--kubeconfig", control_plane.kubeconfig, "get", "namespaces"])
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rljob_cluster import control_plane_programs as programs
from rljob_cluster.api_client import admin_client
from rljob_cluster.binaries import CONTROL_PLANE, binary_directory, require_binaries
from rljob_cluster.commands import ClusterError
from rljob_cluster.control_plane_programs import ControlPlaneLayout, write_credentials

# A program that never outlives this process.

STOP_SECONDS = 10


@dataclass(slots=True)
class ChildProcess:
    """A program and its log. The kernel kills the program when the thread that started it exits for any reason."""

    command: list[str]
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return Path(self.command[0]).name

    def start(self) -> None:
        """Start the program. Raises ClusterError if it is running already."""
        if self._process and self._process.poll() is None:
            raise ClusterError(f"{self.name} is already running as process {self._process.pid}: stop it first")
        with self.log.open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", "--", *self.command]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the program has not exited after 10 s."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def check_running(self) -> None:
        """Raises ClusterError with the last lines of the log if the program has exited."""
        if self._process is None or self._process.poll() is None:
            return
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
        raise ClusterError(
            f"{self.name} exited with code {self._process.returncode}; last lines of {self.log}:\n{tail}"
        )


SOCKET_PATH_MAX = 107


class ControlPlane:
    """etcd and the API server; optionally the controller manager (garbage collection, namespaces, service accounts)
    and the scheduler.

    All are child processes and exit with this process. They listen on 127.0.0.1, on three ports from `base_port`, and
    accept only clients with a certificate or token of this control plane. Files and logs are in `directory`: a control
    plane that is started in the same directory again still has its objects.
    """

    def __init__(
        self,
        directory: Path,
        *,
        base_port: int,
        controller_manager: bool = False,
        scheduler: bool = False,
        binaries: Path | None = None,
    ) -> None:
        """`binaries` is the folder of the programs, by default `binary_directory()`."""
        self.directory = directory.absolute()
        self._layout = ControlPlaneLayout(
            binaries=binaries or binary_directory(),
            directory=self.directory,
            address="127.0.0.1",
            api_port=base_port,
            controller_manager_port=base_port + 1,
            scheduler_port=base_port + 2,
        )
        self._with_controller_manager = controller_manager
        self._with_scheduler = scheduler
        self._etcd: ChildProcess | None = None
        self._api_server: ChildProcess | None = None
        self._followers: list[ChildProcess] = []

    @property
    def url(self) -> str:
        return self._layout.url

    @property
    def ca(self) -> Path:
        """Certificate of the authority that signed the certificate of the API server."""
        return self._layout.authority.pair.certificate

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of a cluster administrator."""
        return self._layout.admin_kubeconfig

    @property
    def kubectl(self) -> Path:
        """kubectl of the same version."""
        return self._layout.binaries / "kubectl"

    def start(self) -> None:
        """Start all programs. Returns when the API server is ready.

        Raises ClusterError if a program is missing or exits, or if the server does not become ready.
        """
        require_binaries(self._layout.binaries, CONTROL_PLANE)
        if len(str(self._layout.etcd_socket)) > SOCKET_PATH_MAX:
            raise ClusterError(
                f"expected a path of at most {SOCKET_PATH_MAX} characters for etcd's socket, found "
                f"{self._layout.etcd_socket}: choose a directory with a shorter path"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        write_credentials(self._layout)
        self._etcd = self._child(programs.etcd(self._layout))
        self._etcd.start()
        self.start_api_server()
        if self._with_controller_manager:
            # Tests create Node objects without a kubelet that renews their Leases.
            patient = [*programs.controller_manager(self._layout), "--node-monitor-grace-period=1h"]
            self._followers.append(self._child(patient))
        if self._with_scheduler:
            self._followers.append(self._child(programs.scheduler(self._layout)))
        for follower in self._followers:
            follower.start()

    def start_api_server(self) -> None:
        """Start the API server, also after `kill_api_server`. Returns when it is ready."""
        self._api_server = self._child(programs.api_server(self._layout))
        self._api_server.start()
        admin_client(self._layout).wait_ready(self.check_running)

    def wait_established(self) -> None:
        """Wait until the CustomResourceDefinitions that were applied are established. Raises ClusterError."""
        admin_client(self._layout).wait_established()

    def kill_api_server(self) -> None:
        """Kill the API server, as a crash does. etcd keeps all writes that the server confirmed."""
        if self._api_server:
            self._api_server.kill()

    def stop(self) -> None:
        for child in [*self._followers, self._api_server, self._etcd]:
            if child:
                child.stop()
        self._followers, self._api_server, self._etcd = [], None, None

    def check_running(self) -> None:
        """Raises ClusterError with the last lines of the log if etcd or the API server has exited."""
        for child in (self._etcd, self._api_server):
            if child:
                child.check_running()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _child(self, command: list[str]) -> ChildProcess:
        return ChildProcess(command, self.directory / f"{Path(command[0]).name}.log")
