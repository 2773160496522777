"""What the policy writes to disk comes back: checkpoints bit for bit, exports as models that transformers loads."""

from __future__ import annotations

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


def weights_after(policy: PolicyProcesses, *steps: int) -> str:
    """The digest of the weights, on which all ranks must agree."""
    for step in steps:
        policy.call("update", scored_batch(step))
    [digest] = set(policy.call("weights_digest"))
    return str(digest)


def test_a_restored_policy_goes_on_bit_for_bit_like_one_that_was_not_interrupted(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run", learning_rate=1e-2, warmup_steps=4)
    directory = tmp_path / "checkpoint"
    with policy_processes(2, config) as policy:
        at_checkpoint = weights_after(policy, 1, 2)
        policy.call("start_checkpoint", directory)
        # The next steps run while the checkpoint is being written: they must not show in it.
        uninterrupted = weights_after(policy, 3, 4)
        policy.call("finish_checkpoint")
        assert all(policy.call("checkpoint_written"))

    with policy_processes(2, config) as policy:
        policy.call("load_checkpoint", directory)
        assert weights_after(policy) == at_checkpoint
        assert weights_after(policy, 3, 4) == uninterrupted


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


def test_exported_parameters_are_in_the_engines_dtype_under_their_checkpoint_names(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model", tied=True)
    with policy_processes(2, policy_config(model_dir, tmp_path / "run", dtype="bfloat16")) as policy:
        policy.call("update", scored_batch(1))
        for kinds in policy.run(_exported_kinds):
            assert kinds.keys() == dict(AutoModelForCausalLM.from_pretrained(model_dir).named_parameters()).keys()
            assert set(kinds.values()) == {torch.bfloat16}


def _exported_kinds(policy: object) -> dict[str, torch.dtype]:
    with policy.weights_for_export() as weights:  # type: ignore[attr-defined]
        return {name: tensor.dtype for name, tensor in weights}
