"""The memory settings of a policy rank act, can be changed between updates, and leave what is learnt as it is."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rljob_testing.memory_plans import memory_plan
from rljob_trainer.algorithm import logprobs
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import policy_processes, scored_batch, tiny_config, weights_digest

MEMORY = memory_plan(micro_batch_tokens=40, logprob_chunk_tokens=7)


def digests_after_updates(config: PolicyConfig, *steps: int) -> list[str]:
    digests: list[str] = []
    with policy_processes(1, config) as policy:
        for step in steps:
            policy.call("update", scored_batch(step))
            digests += policy.run(weights_digest)
    return digests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["unsharded", "under FSDP"])
def test_an_update_that_raised_is_repeated_unless_its_optimizer_step_failed(tmp_path: Path, dtype: str) -> None:
    config = tiny_config(tmp_path, dtype=dtype)
    undisturbed = digests_after_updates(config, 1, 2)
    with policy_processes(1, config) as policy:
        for step, where in ((1, "forward"), (2, "backward")):
            policy.run(_run_out_of_memory, scored_batch(step), where)
            assert policy.call("can_undo_update") == [True]
            policy.call("update", scored_batch(step))
            assert policy.call("can_undo_update") == [False]
            assert policy.run(weights_digest) == [undisturbed[step - 1]]
        policy.run(_run_out_of_memory, scored_batch(3), "optimizer step")
        assert policy.call("can_undo_update") == [False]


def _run_out_of_memory(policy: PolicyRank, batch: RolloutBatch, where: str) -> None:
    """Fail in the middle of the update's second micro-batch, or in its optimizer step."""
    projection = policy._model.decoder_layers[1].get_submodule("self_attn.q_proj")
    runs = 0

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    def in_the_second_forward(_module: object, _args: object, output: torch.Tensor) -> None:
        nonlocal runs
        runs += 1
        if runs == 2 and where == "forward":
            out_of_memory()
        if runs == 2 and where == "backward":
            # By then the layer's other projections have their gradients, and the layer is not done.
            output.register_hook(out_of_memory)

    hooks = [projection.register_forward_hook(in_the_second_forward)]
    if where == "optimizer step":
        policy._optimizer.before_step = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        policy.update(batch)
    for hook in hooks:
        hook.remove()
    assert all(parameter.grad is None for parameter in policy._model.parameters())


@pytest.mark.parametrize("detached", [True, False])
def test_attached_metrics_keep_every_micro_batch_until_the_update_ends(tmp_path: Path, detached: bool) -> None:
    memory = MEMORY.model_copy(update={"detach_metrics": detached})
    config = tiny_config(tmp_path, memory=memory)
    with policy_processes(1, config) as policy:
        [kept] = policy.run(_saved_tensors_kept, scored_batch(1))
        assert policy.run(weights_digest) == digests_after_updates(replace(config, memory=MEMORY), 1)
    assert len(kept) > 2
    if detached:
        assert kept == [0] * len(kept)
    else:  # each adds its own, of which there are more with more sequences
        assert min(later - earlier for earlier, later in pairwise([0, *kept])) >= 0.9 * kept[0] > 0


class _Saved:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _saved_tensors_kept(policy: PolicyRank, batch: RolloutBatch) -> list[int]:
    """The number of tensors that graphs keep after the backward of each micro-batch."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
    kept: list[int] = []

    def save(tensor: torch.Tensor) -> _Saved:
        holder = _Saved(tensor)
        saved.add(holder)
        return holder

    policy._loaded.update.after_micro_batch = lambda _number: kept.append(len(saved))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda holder: holder.tensor):
        policy.update(batch)
    return kept


def test_memory_settings_change_between_updates(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    smaller = memory_plan(micro_batch_tokens=24, logprob_chunk_tokens=3, activation_checkpointing=True)
    with policy_processes(1, config) as policy:
        [before] = policy.run(_what_an_update_does, scored_batch(1))
        policy.call("change_memory", smaller)
        [after] = policy.run(_what_an_update_does, scored_batch(1))
    assert before["layer_runs_per_micro_batch"] == 1
    assert after["layer_runs_per_micro_batch"] == 2, "with checkpointing a layer runs again in backward"
    assert before["largest_chunk"] == 7
    assert after["largest_chunk"] == 3
    assert after["micro_batches"] > before["micro_batches"]


def _what_an_update_does(policy: PolicyRank, batch: RolloutBatch) -> dict[str, float]:
    layer_runs, chunks = [], []
    matmul = logprobs._float32_matmul

    def counting_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        chunks.append(len(left))
        return matmul(left, right)

    logprobs._float32_matmul = counting_rows
    mlp = policy._model.decoder_layers[0].get_submodule("mlp")
    hook = mlp.register_forward_pre_hook(lambda *_: layer_runs.append(1))
    result = policy.update(batch)
    hook.remove()
    logprobs._float32_matmul = matmul
    micro_batches = result.metrics["micro_batches"]
    return {
        "micro_batches": micro_batches,
        "layer_runs_per_micro_batch": len(layer_runs) / micro_batches,
        "largest_chunk": max(chunks),
    }


def test_the_optimizers_whole_state_exists_before_the_first_update(tmp_path: Path) -> None:
    """The engine's KV cache is sized after the policy has loaded: what came later would not be counted."""
    with policy_processes(2, tiny_config(tmp_path)) as policy:
        [before, *_] = policy.run(_optimizer_state_bytes)
        policy.call("update", scored_batch(1))
        assert policy.run(_optimizer_state_bytes)[0] == before
        parameters = policy.run(_parameters)[0]
    assert before == pytest.approx(parameters * 8 / 2, rel=0.01), "two float32 moments, over two ranks"


def _parameters(policy: PolicyRank) -> int:
    return sum(each.numel() for each in policy._model.parameters())


def _optimizer_state_bytes(policy: PolicyRank) -> int:
    return policy._optimizer.state.nbytes


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_in_host_memory_has_no_snapshot_there(tmp_path: Path, offload: bool) -> None:
    """The plan counts no host memory for it, and no update could be undone with it."""
    memory = memory_plan(micro_batch_tokens=40, logprob_chunk_tokens=7, optimizer_offload=offload)
    config = tiny_config(tmp_path, memory=memory, snapshots=True)
    with policy_processes(1, config) as policy:
        assert policy.run(_has_snapshot) == [not offload]
        policy.call("update", scored_batch(1))
        assert policy.call("can_undo_update") == [not offload]


def _has_snapshot(policy: PolicyRank) -> bool:
    return policy._loaded.snapshot is not None
