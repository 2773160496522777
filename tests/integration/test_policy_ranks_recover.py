"""One of several ranks fails: all leave the collective, restore their state, join again and repeat the work.

The same processes then learn, bit for bit, what they learn without a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from rljob_client.errors import RunError
from rljob_trainer.policy import checkpoint, checkpoint_layout, rank
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.policy.update import PolicyUpdate
from tests.integration.policy_processes import (
    RankProcesses,
    before_each_piece,
    policy_processes,
    scored_batch,
    state_of,
    sweep,
    tiny_config,
    written_checkpoint,
)

FAILING_RANK = 1
SMALL_PIECE_BYTES = 256


def out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory (injected)")


def in_forward(policy: PolicyRank) -> None:
    """Between the gathering of a layer's parameters and their use, in the second micro-batch."""
    fail_in_call(policy, 2, lambda _output: out_of_memory())


def in_first_forward(policy: PolicyRank) -> None:
    fail_in_call(policy, 1, lambda _output: out_of_memory())


def in_first_backward(policy: PolicyRank) -> None:
    fail_in_call(policy, 1, lambda output: output.register_hook(lambda _grad: out_of_memory()))


def in_backward(policy: PolicyRank) -> None:
    """While a layer's gradients are computed, in the second micro-batch: FSDP's final callback is not called."""
    fail_in_call(policy, 2, lambda output: output.register_hook(lambda _grad: out_of_memory()))


def fail_in_call(policy: PolicyRank, call: int, fail: Callable[[torch.Tensor], Any]) -> None:
    layer = policy._model.decoder_layers[0].get_submodule("mlp")
    calls = 0

    def hook(_module: nn.Module, _arguments: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == call:
            handle.remove()
            fail(output)

    handle = layer.register_forward_hook(hook)


def in_rehearsal(policy: PolicyRank, fault: Callable[[PolicyRank], None]) -> None:
    """Before the model is loaded."""
    original = PolicyUpdate.rehearse

    def fail(update: PolicyUpdate) -> None:
        fault(policy)
        original(update)

    PolicyUpdate.rehearse = fail  # type: ignore[assignment, method-assign]


def between_micro_batches(policy: PolicyRank) -> None:
    original = policy._loaded.update.after_micro_batch

    def fail(number: int) -> None:
        policy._loaded.update.after_micro_batch = original
        out_of_memory()

    policy._loaded.update.after_micro_batch = fail


def after_optimizer_step(policy: PolicyRank) -> None:
    original = policy._optimizer.after_step

    def fail() -> None:
        policy._optimizer.after_step = original
        out_of_memory()

    policy._optimizer.after_step = fail


def in_optimizer_step(policy: PolicyRank) -> None:
    """Once half of a shard has changed."""
    original = policy._optimizer._step_bucket

    def fail(*arguments: Any) -> None:
        original(*arguments)
        policy._optimizer._step_bucket = original  # type: ignore[method-assign]
        out_of_memory()

    policy._optimizer._step_bucket = fail  # type: ignore[assignment, method-assign]


IN_AN_UPDATE = (in_forward, in_backward, between_micro_batches, in_optimizer_step, after_optimizer_step)
STEPS = range(1, len(IN_AN_UPDATE) + 3)


def in_a_sync(policy: PolicyRank) -> None:
    with policy.weights_for_sync() as weights:
        for number, _ in enumerate(weights):
            if number == 3 and policy.rank == FAILING_RANK:
                out_of_memory()


def in_a_checkpoint(policy: PolicyRank, directory: Path) -> None:
    """The other ranks write in the background, and wait for this one."""
    if policy.rank == FAILING_RANK:
        policy._checkpoint_writer.start = lambda *_arguments: out_of_memory()  # type: ignore[method-assign]
    policy.start_checkpoint(directory)


def inject(policy: PolicyRank, fault: Callable[[PolicyRank], None]) -> None:
    if policy.rank == FAILING_RANK:
        fault(policy)


def updated(policy: PolicyRank, step: int) -> dict[str, float]:
    return policy.update(scored_batch(step)).metrics


def process_id(_policy: PolicyRank) -> int:
    return os.getpid()


def config_of(tmp_path: Path, **changes: Any) -> PolicyConfig:
    return tiny_config(tmp_path, snapshots=True, updates_per_step=2, **changes)


def without_failure(ranks: int, config: PolicyConfig, steps: Iterable[int]) -> list[tuple[dict[str, float], str]]:
    """The metrics and the weights after each step."""
    with policy_processes(ranks, config) as policy:
        return [(policy.run(updated, step)[0], state_of(policy)) for step in steps]


def fail_in_update(policy: RankProcesses, step: int, fault: Callable[[PolicyRank], None]) -> None:
    policy.run(inject, fault)
    outcomes = policy.outcomes(updated, step)
    assert isinstance(outcomes[FAILING_RANK], torch.OutOfMemoryError)
    assert all(policy.call("can_undo_update"))
    policy.rejoin(undo_update=True)


def test_failures_in_every_phase_change_no_bit_and_end_no_process(tmp_path: Path) -> None:
    config = config_of(tmp_path, kl_coefficient=0.1)
    expected = without_failure(2, config, STEPS)
    with policy_processes(2, config) as policy:
        processes = policy.run(process_id)
        for step, fault in zip(STEPS, IN_AN_UPDATE, strict=False):
            fail_in_update(policy, step, fault)
            assert (policy.run(updated, step)[0], state_of(policy)) == expected[step - 1], fault.__name__
        for step, fail in ((STEPS[-2], in_a_sync), (STEPS[-1], partial(in_a_checkpoint, directory=tmp_path / "saved"))):
            assert isinstance(policy.outcomes(fail)[FAILING_RANK], torch.OutOfMemoryError)
            policy.rejoin(undo_update=False)
            assert (policy.run(updated, step)[0], state_of(policy)) == expected[step - 1]
        assert policy.run(process_id) == processes


def write_for_minutes(policy: PolicyRank, slow_ranks: Container[int]) -> None:
    """In a policy process: longer than a rank that rejoins waits for an interrupted checkpoint."""
    checkpoint._LEAVE_SECONDS = 60.0
    if policy.rank not in slow_ranks:
        return
    checkpoint_layout.PIECE_BYTES = SMALL_PIECE_BYTES
    before_each_piece(lambda: time.sleep(0.5 if checkpoint_layout.PIECE_BYTES == SMALL_PIECE_BYTES else 0.0))


def write_fast(_policy: PolicyRank) -> None:
    checkpoint_layout.PIECE_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("copied", "slow_ranks"),
    sweep([(True, {0}), (False, {1}), (True, {0, 1})], (False, {0}), (True, {1}), (False, {0, 1})),
)
def test_a_new_group_does_not_wait_for_a_long_checkpoint(tmp_path: Path, copied: bool, slow_ranks: set[int]) -> None:
    """A rank that has written its part waits for the others, until they have left."""
    config = config_of(tmp_path, checkpoint_copy=copied)
    [_, expected] = without_failure(2, config, (1, 2))
    with policy_processes(2, config) as policy:
        policy.call("update", scored_batch(1))
        policy.run(write_for_minutes, slow_ranks)
        policy.call("start_checkpoint", tmp_path / "interrupted")
        while len([*(tmp_path / "interrupted").glob("__*")]) < 2:
            time.sleep(0.01)
        policy.run(inject, in_first_forward)
        assert isinstance(policy.outcomes(updated, 2)[FAILING_RANK], torch.OutOfMemoryError)
        policy.rejoin(undo_update=True)
        assert (policy.run(updated, 2)[0], state_of(policy)) == expected
        assert not (tmp_path / "interrupted" / ".metadata").exists()
        policy.run(write_fast)
        written_checkpoint(policy, tmp_path / "saved")
        assert policy.call("load_checkpoint", tmp_path / "saved") == [None, None]
        assert state_of(policy) == expected[1]


@pytest.mark.long
def test_four_ranks_recover_from_a_failure_of_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    expected = without_failure(4, config, (1, 2))
    with policy_processes(4, replace(config, compile_ahead=True)) as policy:
        for step, fault in ((1, in_backward), (2, in_optimizer_step)):
            fail_in_update(policy, step, fault)
            assert (policy.run(updated, step)[0], state_of(policy)) == expected[step - 1]


@pytest.mark.parametrize("fault", [in_first_forward, in_first_backward])
def test_a_rank_that_fails_while_it_compiles_ahead_leaves_no_other_waiting(
    tmp_path: Path, fault: Callable[[PolicyRank], None]
) -> None:
    with policy_processes(2, config_of(tmp_path, compile_ahead=True), load=False) as policy:
        policy.run(inject, partial(in_rehearsal, fault=fault))
        outcomes = policy.outcomes(PolicyRank.load)
    assert isinstance(outcomes[FAILING_RANK], torch.OutOfMemoryError)
    assert isinstance(outcomes[1 - FAILING_RANK], RuntimeError)
    assert not isinstance(outcomes[1 - FAILING_RANK], torch.OutOfMemoryError)


def forget_nothing(_policy: PolicyRank) -> None:
    rank.forget_interrupted_pass = lambda _model: None  # type: ignore[assignment, attr-defined]


def test_without_the_reset_of_fsdp_the_losses_differ(tmp_path: Path) -> None:
    """Interrupted at the same point, all ranks still do the same collectives, and nothing else shows the damage."""
    config = config_of(tmp_path)
    expected = without_failure(2, config, (1, 2))
    with policy_processes(2, config) as policy:
        policy.run(in_backward)
        assert all(isinstance(each, Exception) for each in policy.outcomes(updated, 1))
        policy.run(forget_nothing)
        policy.rejoin(undo_update=True)
        found = [policy.run(updated, step)[0]["loss"] for step in (1, 2)]
    assert found != [metrics["loss"] for metrics, _ in expected]


def test_ranks_with_two_copies_of_the_state_leave_and_are_replaced(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    copied = replace(config, memory=config.memory.model_copy(update={"policy_copies": 2}))
    with policy_processes(4, copied) as policy:
        policy.run(inject, in_backward)
        outcomes = policy.outcomes(updated, 1)
        assert isinstance(outcomes[FAILING_RANK], torch.OutOfMemoryError)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), "none still waits for the others"
        with pytest.raises(RunError, match="found several"):
            policy.rejoin(undo_update=True)
