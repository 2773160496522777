"""The group of policy and engines, with gloo and two members in threads of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from rljob_testing.patience import PATIENCE_SECONDS
from rljob_trainer.weight_sync.broadcast import (
    BroadcastGroup,
    BroadcastInterrupted,
    _environment,
    checksum,
    joined_store,
    served_store,
)


@dataclass
class Members:
    sender: BroadcastGroup
    receiver: BroadcastGroup
    threads: ThreadPoolExecutor

    def receive(self, into: torch.Tensor) -> Future[None]:
        return self.threads.submit(self.receiver.broadcast, into, self.receiver.require_sender)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = served_store("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        joining = threads.submit(
            lambda: BroadcastGroup(joined_store("127.0.0.1", store.port), rank=1, size=2, device="cpu")
        )
        made = Members(BroadcastGroup(store, 0, 2, "cpu"), joining.result(), threads)
        yield made
        made.sender.leave()


def no_failure() -> None:
    pass


def test_a_receiver_gets_the_bytes_of_the_sender(members: Members) -> None:
    sent, received = torch.arange(1001, dtype=torch.int64).to(torch.uint8), torch.zeros(1001, dtype=torch.uint8)
    receiving = members.receive(received)
    members.sender.broadcast(sent, no_failure)
    receiving.result()
    assert torch.equal(sent, received)
    assert checksum(sent) == checksum(received)


def test_a_receiver_does_not_wait_for_a_sender_that_has_left(members: Members) -> None:
    receiving = members.receive(torch.zeros(8, dtype=torch.uint8))
    members.sender.leave()
    with pytest.raises(BroadcastInterrupted, match="the policy failed while it sent its weights"):
        receiving.result()


def test_a_sender_does_not_wait_for_a_failed_receiver(members: Members) -> None:
    class EngineFailed(Exception):
        pass

    def watch() -> None:
        raise EngineFailed

    # More than the buffers of the connection take, so that the sender waits for its receiver.
    with pytest.raises((EngineFailed, BroadcastInterrupted)):
        members.sender.broadcast(torch.zeros(64 << 20, dtype=torch.uint8), watch)
    members.receiver.leave()


ABANDON = """
from concurrent.futures import ThreadPoolExecutor
import torch
from rljob_trainer.weight_sync.broadcast import BroadcastGroup, joined_store, served_store

store = served_store("127.0.0.1")
with ThreadPoolExecutor(1) as threads:
    joining = threads.submit(lambda: BroadcastGroup(joined_store("127.0.0.1", store.port), 1, 2, "cpu"))
    group = BroadcastGroup(store, 0, 2, "cpu")
    receiver = joining.result()

def fail():
    raise KeyError

try:
    group.broadcast(torch.zeros(64 << 20, dtype=torch.uint8), fail)
except KeyError:
    print("abandoned", flush=True)
"""


def test_a_process_with_a_pending_broadcast_exits() -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [sys.executable, "-c", ABANDON], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (ended.stdout, ended.returncode) == ("abandoned\n", 0), ended.stderr


@pytest.mark.parametrize("change", [lambda buffer: buffer.zero_(), lambda buffer: buffer[-1:].add_(1)])
def test_a_checksum_shows_bytes_that_did_not_arrive(change: Callable[[torch.Tensor], object]) -> None:
    buffer = torch.arange(1, 8, dtype=torch.uint8)
    before = checksum(buffer)
    change(buffer)
    assert checksum(buffer) != before


def test_variables_of_a_group_do_not_outlive_its_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_A", "1")
    monkeypatch.delenv("RLJOB_B", raising=False)
    with _environment(RLJOB_A="2", RLJOB_B="2"):
        assert (os.environ["RLJOB_A"], os.environ["RLJOB_B"]) == ("2", "2")
    assert os.environ["RLJOB_A"] == "1"
    assert "RLJOB_B" not in os.environ
