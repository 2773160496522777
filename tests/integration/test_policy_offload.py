"""Weights in host memory between phases (`policyOffload`) change no bit, and are back whenever they are needed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_api.roles import LoraSpec
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.rank import PolicyRank
from tests.integration.policy_processes import (
    RankProcesses,
    complete_checkpoint,
    policy_processes,
    scored_batch,
    state_of,
    sweep,
    tiny_config,
    token_logprobs,
    weights_digest,
    written_checkpoint,
)

LORA = LoraSpec(rank=4, alpha=8.0, targets=["q_proj", "v_proj", "down_proj"])
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 with a reference": {"dtype": "bfloat16", "kl_coefficient": 0.1},
    "adapters": {"dtype": "bfloat16", "lora": LORA, "kl_coefficient": 0.1},
}


IN_8_BITS = {"dtype": "bfloat16", "moments": "int8"}
WITH_FROZEN_WEIGHTS = ("bfloat16 with a reference", "adapters")


def config_of(tmp_path: Path, form: str = "bfloat16", **changes: Any) -> PolicyConfig:
    settings = IN_8_BITS if form == "int8 moments" else FORMS[form]
    return tiny_config(tmp_path, **({"learning_rate": 1e-2} | settings | changes))


def bytes_on_device(policy: PolicyRank) -> int:
    """Bytes of all weights on the device."""
    return sum(
        local(each).untyped_storage().nbytes() for model in policy._loaded.models() for each in model.parameters()
    )


def sent(policy: PolicyRank) -> dict[str, bytes]:
    """The weights as the engine gets them, by name."""
    weights = ((name, each.flatten().view(torch.uint8)) for name, each in policy.named_full_parameters())
    return {name: each.to("cpu", copy=True).numpy().tobytes() for name, each in weights}


def offloaded(policy: RankProcesses) -> None:
    policy.call("offload_weights", "sync")
    assert not any(policy.run(bytes_on_device))


def outcome(policy: RankProcesses, *, offload: bool, steps: int = 3) -> tuple[Any, ...]:
    """All that two runs can differ in: the metrics, the weights that are sent, and their masters."""
    if offload:
        offloaded(policy)  # as in a load, before any pass
    metrics = []
    for step in range(1, steps + 1):
        metrics.append(
            [
                {k: v for k, v in each.metrics.items() if not math.isnan(v)}
                for each in policy.call("update", scored_batch(step))
            ]
        )
        weights = policy.run(sent)
        if offload:
            offloaded(policy)
    return metrics, weights, policy.run(weights_digest)


@pytest.mark.parametrize(
    ("form", "ranks"),
    # The rows of a weight are not divisible by 3: FSDP pads the shards in its first pass.
    sweep(
        [("float32", 2), ("bfloat16", 1), ("bfloat16 with a reference", 1), ("adapters", 3)],
        *[("float32", 1), ("bfloat16 with a reference", 2), ("adapters", 1)],
    ),
)
def test_weights_that_were_away_give_the_same_updates_bit_for_bit(tmp_path: Path, form: str, ranks: int) -> None:
    config = config_of(tmp_path, form)
    with policy_processes(ranks, config) as policy:
        expected = outcome(policy, offload=False)
    for copied in (True, False) if form in WITH_FROZEN_WEIGHTS else (True,):
        with policy_processes(ranks, replace(config, copy_frozen_weights=copied)) as policy:
            assert outcome(policy, offload=True) == expected, f"copied: {copied}"


@pytest.mark.parametrize(
    ("form", "optimizer_offload", "ranks"),
    sweep(
        [("float32", False, 2), ("bfloat16", True, 1), ("int8 moments", True, 2), ("adapters", False, 1)],
        *[("float32", True, 1), ("bfloat16", False, 1), ("bfloat16", True, 2), ("int8 moments", False, 1)],
        *[("adapters", True, 1), ("adapters", False, 2)],
    ),
)
def test_a_checkpoint_is_written_from_host_memory(
    tmp_path: Path, form: str, optimizer_offload: bool, ranks: int
) -> None:
    """It begins while the weights are away, does not bring them back, and ends during the next steps."""
    config = config_of(tmp_path, form)
    memory = config.memory.model_copy(update={"optimizer_offload": optimizer_offload})
    config = replace(config, memory=memory, checkpoint_copy=not optimizer_offload)
    directory = tmp_path / "checkpoint"
    with policy_processes(ranks, config) as policy:
        policy.call("update", scored_batch(1))
        at_checkpoint = state_of(policy)
        offloaded(policy)
        policy.call("start_checkpoint", directory)
        assert not any(policy.run(bytes_on_device))
        policy.call("update", scored_batch(2))
        offloaded(policy)
        complete_checkpoint(policy, directory)
        after = state_of(policy)
    with policy_processes(ranks, config) as policy:
        offloaded(policy)
        policy.call("load_checkpoint", directory)
        assert state_of(policy) == at_checkpoint
        offloaded(policy)
        policy.call("update", scored_batch(2))
        assert state_of(policy) == after


@pytest.mark.parametrize(("form", "ranks"), [("float32", 2), ("bfloat16", 1)])
def test_a_checkpoint_is_written_before_weights_return_or_leave(tmp_path: Path, form: str, ranks: int) -> None:
    """Weights leave during a checkpoint after a recovery: it begins before the sync, and reads the device's weights."""
    config = replace(config_of(tmp_path, form), checkpoint_copy=False)
    with policy_processes(ranks, config) as policy:
        policy.call("update", scored_batch(1))
        expected = policy.run(weights_digest)
        offloaded(policy)
        written_checkpoint(policy, tmp_path / "away")
        assert not any(policy.run(bytes_on_device))
        policy.call("update", scored_batch(2))
        after = policy.run(weights_digest)
        policy.call("start_checkpoint", tmp_path / "on-device")
        offloaded(policy)
        assert policy.run(written) == [True] * ranks
        complete_checkpoint(policy, tmp_path / "on-device")
        for name, digest in (("away", expected), ("on-device", after)):
            policy.call("load_checkpoint", tmp_path / name)
            assert policy.run(weights_digest) == digest


def written(policy: PolicyRank) -> bool:
    return policy._checkpoint_writer.written()


def exported(policy: RankProcesses, directory: Path) -> bytes:
    policy.call("export_pretrained", directory)
    return (directory / "model.safetensors").read_bytes()


def test_every_method_that_reads_weights_brings_them_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, "adapters")
    with policy_processes(2, config) as policy:
        policy.call("update", scored_batch(1))
        batch = scored_batch(2)
        logprobs, digest = policy.run(token_logprobs, batch)[0], policy.run(weights_digest)
        model, weights = exported(policy, tmp_path / "first"), policy.run(sent)
        offloaded(policy)
        assert [each.tobytes() for each in policy.run(token_logprobs, batch)[0]] == [
            each.tobytes() for each in logprobs
        ]
        offloaded(policy)
        assert policy.run(weights_digest) == digest
        offloaded(policy)
        assert exported(policy, tmp_path / "second") == model
        offloaded(policy)
        assert policy.run(sent) == weights


def test_settings_change_while_the_weights_are_away(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with policy_processes(1, config) as policy:
        policy.call("update", scored_batch(1))
        policy.call("update", scored_batch(2))
        expected = policy.run(weights_digest)
    with policy_processes(1, config) as policy:
        policy.call("update", scored_batch(1))
        offloaded(policy)
        changed = config.memory.model_copy(update={"optimizer_offload": True, "activation_checkpointing": True})
        policy.call("change_memory", changed)
        assert policy.call("can_undo_update") == [False]
        assert policy.run(bytes_on_device) == [0]
        policy.call("update", scored_batch(2))
        assert policy.run(weights_digest) == expected


def run_out_of_memory_on_the_way_back(policy: PolicyRank, step: int, failing_rank: int) -> list[bool]:
    """The device has room for some of the weights. True if the update can be repeated, and if all weights are away."""
    freed = policy._loaded.offload._freed
    last = freed[-1].storage

    class Refusing:
        def resize_(self, nbytes: int) -> None:
            if nbytes:
                raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    if policy.rank == failing_rank:
        freed[-1] = replace(freed[-1], storage=Refusing())  # type: ignore[arg-type]
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)):
        policy.update(scored_batch(step))
    if policy.rank == failing_rank:
        freed[-1] = replace(freed[-1], storage=last)
    return [policy.can_undo_update(), bytes_on_device(policy) == 0]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_an_update_without_room_for_the_weights_is_repeated(tmp_path: Path, ranks: int) -> None:
    config = config_of(tmp_path, "bfloat16", snapshots=ranks > 1)
    with policy_processes(ranks, config) as policy:
        expected = outcome(policy, offload=False)
    with policy_processes(ranks, config) as policy:
        policy.call("update", scored_batch(1))
        policy.call("update", scored_batch(2))
        offloaded(policy)
        failed = policy.run(run_out_of_memory_on_the_way_back, 3, ranks - 1)
        assert failed[-1] == [True, True]
        if ranks > 1:
            policy.rejoin(undo_update=True)
        offloaded(policy)  # a rank that had room has them
        policy.call("update", scored_batch(3))
        assert policy.run(weights_digest) == expected[2]


def test_a_snapshot_is_restored_into_weights_that_were_away(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bfloat16", snapshots=True)
    with policy_processes(2, config) as policy:
        policy.call("update", scored_batch(1))
        before = policy.run(weights_digest)
        policy.call("update", scored_batch(2))
        after = policy.run(weights_digest)
        offloaded(policy)
        policy.rejoin(undo_update=True)
        assert policy.run(weights_digest) == before
        offloaded(policy)
        policy.call("update", scored_batch(2))
        assert policy.run(weights_digest) == after
