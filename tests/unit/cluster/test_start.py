"""The start of a cluster on a busy machine, and after an interrupted start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_cluster import api_client, cgroups, cluster, machine, machine_init
from rljob_cluster.api_client import ApiClient
from rljob_cluster.control_plane_programs import write_credentials
from rljob_cluster.layout import ClusterLayout


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterLayout:
    """A cluster whose machine runs."""
    monkeypatch.setattr(api_client, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(machine, "first_process", lambda: 1)
    monkeypatch.setattr(machine, "is_linked", lambda: True)
    layout = ClusterLayout(tmp_path, tmp_path)
    layout.state.mkdir()
    write_credentials(layout.control_plane)
    return layout


def answer(monkeypatch: pytest.MonkeyPatch, answers: Iterator[bytes | None]) -> None:
    monkeypatch.setattr(ApiClient, "get", lambda client, path: next(answers))


def test_a_cluster_that_answers_late_is_running(layout: ClusterLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, iter([None, None, b"ok"]))
    assert cluster.api_answers(layout)


def test_a_cluster_that_never_answers_is_not_running(layout: ClusterLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.0)
    answer(monkeypatch, iter(lambda: None, b""))
    assert not cluster.api_answers(layout)


@pytest.mark.parametrize("has_starter", [True, False])
def test_a_machine_starts_only_for_a_starter_that_lives(monkeypatch: pytest.MonkeyPatch, has_starter: bool) -> None:
    entered: list[str] = []
    started: list[list[str]] = []
    monkeypatch.setattr(cgroups, "enter", entered.append)
    monkeypatch.setattr(os, "execvp", lambda program, command: started.append(command))
    starter = os.getppid() if has_starter else os.getpid()
    monkeypatch.setattr(sys, "argv", ["machine_init", "root", "binaries", str(starter)])
    if has_starter:
        machine_init.main()
    else:
        with pytest.raises(SystemExit, match="has exited"):
            machine_init.main()
    assert entered == [cgroups.MACHINE]
    assert len(started) == has_starter
