"""A role in its own process, without Ray."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_trainer.errors import HostOutOfMemory
from rljob_trainer.roles import actor
from rljob_trainer.roles.actor import RoleActor


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
