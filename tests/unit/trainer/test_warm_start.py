"""Role processes as forks of a server: what a fork is like, and that nothing is left or missing without a server."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from rljob_api.status import Role
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_testing.runs import steady_environment
from rljob_trainer.roles.warm import server, setup_worker, start
from rljob_trainer.roles.warm.server import SERVER_ENVIRONMENT, differences
from rljob_trainer.rollout.config import engine_environment

# The real imports take seconds; `json` stands for them.
_SERVE = """
import json, sys
from rljob_trainer.roles.warm import server
server._SHARED, server.MODULES = ["json"], {"policy": [["json"]], "rollout": []}
server.OF_DEVICE = {("policy", "cpu"): [], ("rollout", "cpu"): [["threaded"]]}
server._apply = lambda environment: None
server.main(*map(json.loads, sys.argv[1:]))
"""
_REPORT = """
import json, os, resource, signal, sys
import psutil
print(json.dumps({
    "pid": os.getpid(), "grandparent": psutil.Process(os.getppid()).ppid(),
    "arguments": sys.argv, "input": sys.stdin.read(), "main": __name__,
    "priority": os.getpriority(os.PRIO_PROCESS, 0), "oom": open("/proc/self/oom_score_adj").read(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "cores": sorted(os.sched_getaffinity(0)),
    "directory": os.getcwd(), "environment": dict(os.environ), "path": sys.path,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "descriptors": [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
}))
"""
_THREADED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
_WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[start.WarmStart]:
    monkeypatch.setattr(start, "_SERVE", _SERVE)
    (tmp_path / "threaded.py").write_text(_THREADED)
    servers = start.WarmStart(["policy"], "cpu", steady_environment())
    yield servers
    servers.end()
    assert not servers.directory.exists()


def worker(
    directory: Path | str, folder: Path, program: str, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    """A process as the raylet starts it."""
    (folder / "worker.py").write_text(program)
    context = {"env_vars": {setup_worker.ROLE_VARIABLE: "policy", **variables}, "py_executable": sys.executable}
    return subprocess.Popen(
        [
            *(sys.executable, setup_worker.__file__, f"--serialized-runtime-env-context={json.dumps(context)}"),
            *("--language=PYTHON", str(folder / "worker.py"), *arguments),
        ],
        env={**steady_environment(), **SERVER_ENVIRONMENT, setup_worker.DIRECTORY_VARIABLE: str(directory)},
        cwd=folder,
        preexec_fn=_as_of_a_raylet,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _as_of_a_raylet() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    Path("/proc/self/oom_score_adj").write_text("900")
    resource.setrlimit(resource.RLIMIT_NOFILE, (321, 4321))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def report(process: subprocess.Popen[str]) -> Any:
    printed, _ = process.communicate("given", timeout=PATIENCE_SECONDS)
    return json.loads(printed)


def printed_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def wait_until_gone(pid: int) -> None:
    deadline = Deadline(PATIENCE_SECONDS)
    while psutil.pid_exists(pid):
        assert not deadline.passed, f"process {pid} is still there: {psutil.Process(pid)}"
        time.sleep(0.01)


def test_a_fork_is_as_the_process_that_it_stands_for(warm: start.WarmStart, tmp_path: Path) -> None:
    cold = report(worker("", tmp_path, _REPORT, "a b", "--c", OMP_NUM_THREADS="3", RAY_X="y"))
    process = worker(warm.directory, tmp_path, _REPORT, "a b", "--c", OMP_NUM_THREADS="3", RAY_X="y")
    forked = report(process)
    assert psutil.Process(forked["grandparent"]).ppid() == warm.process.pid != cold["grandparent"]
    assert forked["pid"] != process.pid
    assert (forked["priority"], forked["blocked"]) == (19, [signal.SIGINT])
    assert forked["descriptors"] == cold["descriptors"] == [0, 1, 2]
    for found in (cold, forked):
        del found["pid"], found["grandparent"], found["environment"][setup_worker.DIRECTORY_VARIABLE]
    assert forked == cold


@pytest.mark.parametrize("code", [0, 3, -signal.SIGTERM, -signal.SIGKILL])
def test_the_started_process_ends_as_its_fork_does(warm: start.WarmStart, tmp_path: Path, code: int) -> None:
    end = f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    process = worker(warm.directory, tmp_path, f"import os, sys; {end}")
    assert process.wait(PATIENCE_SECONDS) == code
    [server] = psutil.Process(warm.process.pid).children()
    for keeper in server.children():
        wait_until_gone(keeper.pid)  # no zombie


def test_a_fork_ends_with_the_started_process_or_its_server(warm: start.WarmStart, tmp_path: Path) -> None:
    process = worker(warm.directory, tmp_path, _WAIT)
    fork = printed_pid(process)
    process.kill()
    wait_until_gone(fork)
    process = worker(warm.directory, tmp_path, _WAIT)
    fork = printed_pid(process)
    warm.process.kill()
    warm.process.wait()
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    wait_until_gone(fork)
    following = worker(warm.directory, tmp_path, _REPORT)
    assert report(following)["pid"] == following.pid, "it starts cold"


def test_processes_start_cold_if_a_fork_would_differ(warm: start.WarmStart, tmp_path: Path) -> None:
    """Because of a variable that imports read."""
    process = worker(warm.directory, tmp_path, _REPORT, TORCH_COMPILE_DISABLE="1")
    assert report(process)["pid"] == process.pid


def test_roles_share_imports_and_keep_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The module `shared` is imported once, and each role's module with the variables of its role."""
    monkeypatch.setattr(start, "_SERVE", _SERVE.replace('["json"]', '["shared"]', 1).replace("threaded", "own"))
    (tmp_path / "shared.py").write_text("import os\nprocess = os.getpid()\n")
    (tmp_path / "own.py").write_text("import os\nfound = os.environ['VLLM_LOGGING_LEVEL']\n")
    servers = start.WarmStart(["policy", "rollout"], "cpu", steady_environment() | {"PYTHONPATH": str(tmp_path)})
    program = "import json, sys; print(json.dumps([sys.modules[name].__dict__.get({!r}) for name in {!r}]))"
    given = {"PYTHONPATH": str(tmp_path)}
    policy = report(worker(servers.directory, tmp_path, program.format("process", ["shared"]), **given))
    given |= {setup_worker.ROLE_VARIABLE: "rollout", **engine_environment("cpu")}
    assert policy == [servers.process.pid]
    assert report(worker(servers.directory, tmp_path, program.format("process", ["shared"]), **given)) == policy
    assert report(worker(servers.directory, tmp_path, program.format("found", ["own"]), **given)) == ["WARNING"]
    servers.end()


@pytest.mark.parametrize("roles", [["rollout"], ["rollout", "policy"], ["policy", "rollout"]])
def test_a_module_that_fails_or_starts_a_thread_is_left_to_the_forks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, roles: list[Role]
) -> None:
    groups = '"rollout": [["first"], ["threaded"], ["absent"]]'
    monkeypatch.setattr(
        start, "_SERVE", _SERVE.replace('"rollout": []', groups).replace('[["threaded"]]}', '[["last"]]}')
    )
    for name, text in {"first": "", "threaded": _THREADED, "last": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    servers = start.WarmStart(roles, "cpu", steady_environment() | {"PYTHONPATH": str(tmp_path)})
    given = {"PYTHONPATH": str(tmp_path)}
    of_engine = {setup_worker.ROLE_VARIABLE: "rollout", **engine_environment("cpu")}
    names = (
        "import json, sys; print(json.dumps([name for name in ('first', 'threaded', 'last') if name in sys.modules]))"
    )
    assert report(worker(servers.directory, tmp_path, names, **given, **of_engine)) == ["first", "last"]
    log = (servers.directory / "servers.log").read_text()
    assert "rollout processes import threaded themselves: its import has started the thread python" in log
    assert "rollout processes import absent themselves: ModuleNotFoundError: No module named 'absent'" in log
    if "policy" in roles:
        process = worker(servers.directory, tmp_path, _REPORT, **given)
        assert report(process)["pid"] != process.pid
    servers.end()


_START_SERVERS = f"""
import os
from rljob_trainer.roles.warm import start
start._SERVE = {_SERVE!r}
print(start.WarmStart(["policy"], "cpu", os.environ).process.pid, flush=True)
input()
"""


def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", _START_SERVERS], os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    server = printed_pid(process)
    process.kill()
    process.communicate()
    wait_until_gone(server)


def test_other_runtime_environments_are_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ['--serialized-runtime-env-context={"command_prefix": ["nice"]}', "--language=PYTHON", "worker.py"]
    monkeypatch.setattr(sys, "argv", ["setup_worker.py", *arguments])
    executed: list[list[str]] = []

    def execute(_program: str, command: list[str]) -> None:
        executed.append(command)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execute)
    with pytest.raises(SystemExit):
        setup_worker.main()
    assert executed == [[sys.executable, "-m", "ray._private.workers.setup_worker", *arguments]]


def test_only_variables_that_imports_ignore_may_differ() -> None:
    own = {"HOME": "/root", "VLLM_LOGGING_LEVEL": "WARNING"}
    given = {"HOME": "/root", "RAY_JOB_ID": "1", "PYTORCH_CUDA_ALLOC_CONF": "x", "NCCL_NVLS_ENABLE": "0"}
    given |= {"MLFLOW_RUN_ID": "1", "_MLFLOW_TELEMETRY_SESSION_ID": "2"}  # a controller that has imported mlflow
    assert differences(given, own) == ["VLLM_LOGGING_LEVEL"]
    assert differences(own | {"LD_PRELOAD": "x.so"}, own) == ["LD_PRELOAD"]


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_a_module_that_asks_for_gpus_does_not_initialize_cuda(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"asking_with_{capability and 'gpus'}"
    (tmp_path / f"{name}.py").write_text("import torch\nanswer = torch.cuda.is_available()\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = Mock(side_effect=AssertionError("CUDA would be initialized"))
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    loaded = {name: sys.modules[name] for name in server.IMPORTED_IN_FORKS if name in sys.modules}
    server._import([name], capability)
    sys.modules.update(loaded)
    assert sys.modules[name].answer is (capability is not None)
    assert torch.cuda.is_available is asked
