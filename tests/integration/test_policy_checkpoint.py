"""Checkpoints of the policy restore bit for bit; transformers loads its exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_processes import (
    PolicyProcesses,
    parameters,
    policy_config,
    policy_processes,
    scored_batch,
    tiny_model,
)
from transformers import AutoModelForCausalLM

from rljob_trainer.errors import BadInput
from rljob_trainer.ledger.checkpoint_manifest import MANIFEST_NAME, describe, digest_of
from rljob_trainer.policy.config import LoraConfig


def weights_after(policy: PolicyProcesses, *steps: int) -> str:
    """The digest of the weights, on which all ranks must agree."""
    for step in steps:
        policy.call("update", scored_batch(step))
    [digest] = set(policy.call("weights_digest"))
    return str(digest)


def test_a_restored_policy_continues_bit_for_bit(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run", learning_rate=1e-2, warmup_steps=4)
    directory = tmp_path / "checkpoint"
    with policy_processes(2, config) as policy:
        at_checkpoint = weights_after(policy, 1, 2)
        policy.call("start_checkpoint", directory)
        # The next steps run while the checkpoint is being written: they must not show in it.
        uninterrupted = weights_after(policy, 3, 4)
        of_ranks = policy.call("finish_checkpoint")
        assert all(policy.call("checkpoint_written"))
        assert [sorted(name for name in digests) for digests in of_ranks] == [["__0_0.distcp"], ["__1_0.distcp"]]
        digests = of_ranks[0] | of_ranks[1]
        assert digests == {name: digest_of(directory / name) for name in digests}
        (directory / MANIFEST_NAME).write_bytes(describe(directory, 2, {}, digests).to_json())
        assert policy.call("find_checkpoint_damage", directory) == [None, None]

    with policy_processes(2, config) as policy:
        policy.call("load_checkpoint", directory)
        assert weights_after(policy) == at_checkpoint
        assert weights_after(policy, 3, 4) == uninterrupted
        file = directory / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        damage = "__1_0.distcp is corrupt (its checksum differs)"
        assert policy.call("find_checkpoint_damage", directory) == [None, damage]


def test_replayed_updates_without_a_checkpoint_give_the_same_bits(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run")
    with policy_processes(2, config) as policy:
        once = weights_after(policy, 1, 2)
    with policy_processes(2, config) as policy:
        assert weights_after(policy, 1, 2) == once


def test_a_checkpoint_of_two_ranks_loads_into_one(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run")
    with policy_processes(2, config) as policy:
        expected = weights_after(policy, 1)
        policy.call("start_checkpoint", tmp_path / "checkpoint")
        policy.call("finish_checkpoint")
    with policy_processes(1, config) as policy:
        policy.call("load_checkpoint", tmp_path / "checkpoint")
        assert weights_after(policy) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_streamed_optimizer_checkpoints_and_resumes_as_a_plain_one(tmp_path: Path, dtype: str) -> None:
    """State in host memory is written from where it is, so the next step waits; the plan may change on resumption."""
    plain = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run", dtype=dtype, learning_rate=1e-2)
    streamed = replace(plain, memory=plain.memory.model_copy(update={"optimizer_offload": True}))
    ends, starts = [], []
    for config in (plain, streamed):
        directory = tmp_path / f"checkpoint-{len(ends)}"
        with policy_processes(1, config) as policy:
            starts.append(weights_after(policy, 1, 2))
            policy.call("start_checkpoint", directory)
            ends.append(weights_after(policy, 3))
            policy.call("finish_checkpoint")
    assert starts[0] == starts[1]
    assert ends[0] == ends[1]
    for config, directory in ((plain, "checkpoint-1"), (streamed, "checkpoint-0")):
        with policy_processes(1, config) as policy:
            policy.call("load_checkpoint", tmp_path / directory)
            assert weights_after(policy) == starts[0]
            # Live, as after a failure that the plan answers.
            policy.call("change_memory", plain.memory)
            assert weights_after(policy, 3) == ends[0]


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    with policy_processes(1, policy_config(tiny_model(tmp_path / "untied"), tmp_path / "run")) as policy:
        policy.call("update", scored_batch(1))
        policy.call("start_checkpoint", tmp_path / "checkpoint")
        policy.call("finish_checkpoint")
    adapters = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",))
    config = policy_config(tmp_path / "untied", tmp_path / "run", lora=adapters)
    with policy_processes(1, config) as policy, pytest.raises(BadInput, match="belongs to another model or optimizer"):
        policy.call("load_checkpoint", tmp_path / "checkpoint")


def test_a_second_checkpoint_waits_for_the_first_to_be_finished(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run")
    with policy_processes(1, config) as policy:
        policy.call("start_checkpoint", tmp_path / "first")
        with pytest.raises(RuntimeError, match="still being written"):
            policy.call("start_checkpoint", tmp_path / "second")
        policy.call("finish_checkpoint")
        policy.call("start_checkpoint", tmp_path / "second")
        policy.call("finish_checkpoint")


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)])
def test_the_exported_model_is_the_policy_to_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    model_dir = tiny_model(tmp_path / "model", kind, tied=tied)
    (model_dir / "tokenizer.json").write_text("{}")
    config = policy_config(model_dir, tmp_path / "run", learning_rate=1e-2)
    batch = scored_batch(1)
    with policy_processes(2, config) as policy:
        policy.call("update", batch)
        policy.call("export_pretrained", tmp_path / "exported")
        expected = policy.call("token_logprobs", batch)[0]
        trained = policy.run(parameters)[0]

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert exported.dtype == torch.float32
    assert {name: tuple(p.shape) for name, p in exported.named_parameters()} == {
        name: array.shape for name, array in trained.items()
    }
    for name, parameter in exported.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), trained[name])
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied
    assert (tmp_path / "exported/tokenizer.json").read_text() == "{}"
    for i, logprobs in enumerate(expected):
        if len(logprobs):
            prompt, response = batch.prompt_ids[i // batch.group_size], batch.response_ids[i]
            logits = exported(input_ids=torch.tensor(np.concatenate([prompt, response]))[None].long()).logits
            found = torch.log_softmax(logits[0, len(prompt) - 1 : -1], -1)
            chosen = found.gather(1, torch.tensor(response).long()[:, None])[:, 0].detach().numpy()
            np.testing.assert_allclose(chosen, logprobs, atol=1e-5)


def test_exports_have_the_engines_dtype_and_checkpoint_names(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model", tied=True)
    with policy_processes(2, policy_config(model_dir, tmp_path / "run", dtype="bfloat16")) as policy:
        policy.call("update", scored_batch(1))
        for kinds in policy.run(_exported_kinds):
            assert kinds.keys() == dict(AutoModelForCausalLM.from_pretrained(model_dir).named_parameters()).keys()
            assert set(kinds.values()) == {torch.bfloat16}


def _exported_kinds(policy: object) -> dict[str, torch.dtype]:
    with policy.weights_for_sync() as weights:  # type: ignore[attr-defined]
        return {name: tensor.dtype for name, tensor in weights}
