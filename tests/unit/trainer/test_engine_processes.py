"""Start and replacement of engines that have several processes each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.errors import WorkerLost
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.roles import generation, role_processes
from rljob_trainer.roles import roles as roles_module
from rljob_trainer.roles.settings import RoleSettings
from rljob_trainer.roles.topologies import roles_of
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout_batch import Prompt

TOPOLOGIES = ("Colocated", "Disaggregated")


@dataclass
class Process:
    """Records the calls to it. A call stands for its result."""

    name: str
    received: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    @property
    def actor(self) -> Process:
        return self

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*arguments: Any) -> str:
            self.received.append((method, arguments))
            return f"{method} of {self.name}"

        return SimpleNamespace(remote=remote)


@dataclass
class Machine:
    """Processes that were started and killed, in order."""

    started: list[Process] = field(default_factory=list)
    killed: list[Process] = field(default_factory=list)

    def spawn(self, name: str, *_: Any) -> Process:
        self.started.append(Process(name))
        return self.started[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(role_processes, "spawn", machine.spawn)
    monkeypatch.setattr("ray.kill", lambda actor, no_restart: machine.killed.append(actor))
    for module in (roles_module, generation):
        monkeypatch.setattr(module, "wait_for", lambda calls, *_: calls)
    return machine


def roles_with(processes: int, size: int, topology: Any = "Disaggregated") -> Any:
    rollout = RolloutConfig(Path("/model"), "cpu", "float32", 64, 8, 1 << 20, 8, tensor_parallel_size=size)
    policy: Any = SimpleNamespace(device="cpu", memory=SimpleNamespace(policy_offload=False))
    settings = RoleSettings(topology, 1, processes, policy, rollout, {}, {}, Path("/out"), None)
    roles = roles_of(settings, PartClock())
    roles.engines.start({})
    roles.policy.loading, roles.policy.loaded = {"policy-0": "load of policy-0"}, True
    return roles


def starts(processes: list[Process]) -> list[tuple[Any, ...]]:
    return [arguments for process in processes for method, arguments in process.received if method == "start"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_processes_of_an_engine_meet_at_a_port_of_its_first(machine: Machine, topology: str) -> None:
    roles_with(4, 2, topology).load()
    first, second = ("serve_store of rollout-0",), ("serve_store of rollout-2",)
    assert starts(machine.started) == [first, first, second, second]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_engine_of_one_process_needs_no_port(machine: Machine, topology: str) -> None:
    roles_with(2, 1, topology).load()
    assert starts(machine.started) == [(), ()]


@pytest.mark.parametrize(
    ("size", "lost", "replaced"), [(1, 2, [2]), (2, 0, [0, 1]), (2, 3, [2, 3]), (4, 2, [0, 1, 2, 3])]
)
def test_a_lost_process_is_replaced_with_those_of_its_engine(
    size: int, lost: int, replaced: list[int], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = roles_with(8, size)
    before = list(machine.started)
    running: Callable[..., Any] = roles.generate(
        1, [Prompt(0, [0], "")], 1, [0], [1.0], may_replace=lambda _: True
    ).replacement
    calls = running(WorkerLost("died").of(f"rollout-{lost}"))
    names = [f"rollout-{rank}" for rank in replaced]
    assert machine.killed == [before[rank] for rank in replaced], "peers wait for the lost one in a collective"
    new = machine.started[len(before) :]
    assert list(calls) == [process.name for process in new] == names
    assert [process.received[0][1][0] for process in new] == replaced, "a rank is constructed as before"
    assert starts(new) == [(f"serve_store of {names[0]}",) if size > 1 else ()] * size
    assert list(roles.engines.handles) == [f"rollout-{rank}" for rank in range(8)]
    assert roles.engines_at is None
