"""A role in its own process, without Ray."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rljob_trainer.errors import HostOutOfMemory
from rljob_trainer.roles import actor
from rljob_trainer.roles.actor import RoleActor, is_repeatable, refused_input


class Engine:
    def __init__(self) -> None:
        raise MemoryError


def test_a_role_that_was_not_constructed_fails_every_call_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the constructors of engines that replace lost ones."""
    monkeypatch.setattr(actor, "_redirect_output", lambda _log: None)
    monkeypatch.setattr(actor, "long_imports", nullcontext)
    monkeypatch.setattr(importlib, "import_module", lambda _name: SimpleNamespace(Engine=Engine))
    made = RoleActor("rollout-1", "module:Engine", Path("log"))
    with pytest.raises(HostOutOfMemory):
        made.construct()
    with pytest.raises(HostOutOfMemory) as raised:
        made.call(None, "start")
    assert raised.value.actor == "rollout-1"


class Unpassable(Exception):
    """Of no type that Python code raises by mistake."""


@pytest.mark.parametrize(
    ("error", "repeatable"),
    [
        (ValueError("GenerationConfig is invalid"), True),
        (TypeError("unexpected keyword"), True),
        (KeyError("hidden_size"), True),
        (IndexError("index out of range in self"), True),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), True),
        (AttributeError("no attribute"), True),
        (NotImplementedError("head size 16"), True),
        (RecursionError("too deep"), True),
        (ValueError("Default process group has not been initialized"), False),  # a peer has left
        (RuntimeError("Unsupported CPU attention configuration: head_dim=16"), True),
        (ValueError("Free memory on device cuda:0 is less than desired"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("NCCL error: unhandled system error"), False),
        (RuntimeError("[gloo] Connection closed by peer"), False),
        (torch.distributed.DistBackendError("NCCL"), False),
        (torch.distributed.DistNetworkError("timed out"), False),
        (ConnectionResetError("peer"), False),
        (TimeoutError("late"), False),
        (OSError(5, "Input/output error"), False),
        (Unpassable("vLLM's engine died"), False),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}"[:40] if isinstance(value, Exception) else "",
)
def test_only_ordinary_exceptions_count_as_repeatable(error: Exception, repeatable: bool) -> None:
    assert is_repeatable(error) is repeatable
    assert (refused_input(error, "start") is not None) is (repeatable and type(error) is not RuntimeError)
    assert refused_input(error, "update") is None


def test_an_assertion_while_an_engine_starts_may_pass() -> None:
    """vLLM asserts that no other process frees memory while it measures its own."""
    assert refused_input(AssertionError("Error in memory profiling"), "start") is None
    assert is_repeatable(AssertionError())
