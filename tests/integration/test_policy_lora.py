"""Low-rank adapters: one and two ranks train them alike, checkpoints hold them alone, and both exports load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from rljob_api.roles import LoraSpec
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import (
    parameters,
    policy_processes,
    scored_batch,
    tiny_config,
    token_logprobs,
    weights_digest,
    written_checkpoint,
)

LORA = LoraSpec(rank=4, alpha=8.0, targets=["q_proj", "v_proj", "down_proj"])


def lora_config(tmp_path: Path, **changes: Any) -> PolicyConfig:
    return tiny_config(tmp_path, **({"learning_rate": 1e-2, "lora": LORA} | changes))


def adapters(policy: PolicyRank) -> dict[str, np.ndarray]:
    from rljob_trainer.policy.gradients import full

    trained = ((name, each) for name, each in policy._model.named_parameters() if each.requires_grad)
    return {name: full(each).numpy().copy() for name, each in trained}


def optimizer_elements(policy: PolicyRank) -> int:
    whole = policy._optimizer.state.arrays()
    return whole["exp_avg"].numel() + whole["exp_avg_sq"].numel()


def test_adapters_start_without_effect_and_equal_on_every_rank(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    initial = dict(AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32).named_parameters())
    with policy_processes(2, config) as policy:
        first, second = policy.run(adapters)
        sent = policy.run(parameters)[0]
    with policy_processes(1, config) as policy:
        [alone] = policy.run(adapters)
    assert len(first) == 2 * len(LORA.targets) * 2
    for name, value in first.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, second[name])
        np.testing.assert_array_equal(value, alone[name])
        assert value.any() == (".lora_A." in name)
    assert sent.keys() == initial.keys()
    for name, weight in sent.items():
        np.testing.assert_array_equal(weight, initial[name].detach().numpy(), err_msg=name)


@pytest.mark.parametrize("loss", [{}, {"kl_coefficient": 0.5}], ids=["plain", "kl"])
def test_ranks_train_adapters_as_one_process_trains_them_with_peft(tmp_path: Path, loss: dict[str, Any]) -> None:
    config = lora_config(tmp_path, **loss)
    results = {}
    for ranks in (1, 2):
        with policy_processes(ranks, config) as policy:
            metrics = [policy.call("update", scored_batch(step))[0].metrics for step in (1, 2)]
            results[ranks] = (metrics, policy.run(adapters)[0], policy.run(parameters)[0])
            logprobs = policy.run(token_logprobs, scored_batch(3))[0]
            assert policy.run(optimizer_elements)[0] * ranks >= 2 * sum(
                each.size for each in results[ranks][1].values()
            )
            policy.call("export_pretrained", tmp_path / f"merged-{ranks}")
    (one, adapters_of_one, sent_by_one), (two, adapters_of_two, _) = results.values()
    for alone, shared in zip(one, two, strict=True):
        names = ("loss", "entropy", "logprob_diff_mean", *(["kl"] if loss else []))
        assert [alone[name] for name in names] == pytest.approx([shared[name] for name in names], rel=1e-4, abs=1e-6)
    if loss:
        assert one[0]["kl"] == pytest.approx(0, abs=1e-8), "the reference is the model without its adapters"
        assert one[1]["kl"] > 1e-6
    for name, value in adapters_of_one.items():
        np.testing.assert_allclose(value, adapters_of_two[name], atol=1e-4, err_msg=name)

    # What the engines get, and what is exported, is the model that the policy computes with.
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged-2", dtype=torch.float32)
    initial = dict(AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32).named_parameters())
    moved = {
        name.rpartition(".weight")[0].rpartition(".")[2]
        for name, weight in sent_by_one.items()
        if (weight != initial[name].detach().numpy()).any()
    }
    assert moved == set(LORA.targets)
    batch = scored_batch(3)
    for i, found in enumerate(logprobs):
        if len(found):
            np.testing.assert_allclose(found, _logprobs(exported, batch, i), atol=1e-5)


def test_frozen_bfloat16_weights_and_float32_adapters_are_sharded_together(tmp_path: Path) -> None:
    config = lora_config(tmp_path, dtype="bfloat16", kl_coefficient=0.1)
    metrics = []
    for ranks in (1, 2):
        with policy_processes(ranks, config) as policy:
            metrics.append([policy.call("update", scored_batch(step))[0].metrics for step in (1, 2)])
            dtypes = policy.run(_dtypes)[0]
    assert dtypes == {(torch.bfloat16, False), (torch.float32, True)}
    for alone, shared in zip(*metrics, strict=True):
        for name in ("entropy", "grad_norm"):
            assert alone[name] == pytest.approx(shared[name], rel=0.02), name
    assert metrics[1][0]["kl"] == 0


def _dtypes(policy: PolicyRank) -> set[tuple[torch.dtype, bool]]:
    return {(parameter.dtype, parameter.requires_grad) for parameter in policy._model.parameters()}


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    with policy_processes(2, config) as policy:
        policy.call("update", scored_batch(1))
        written_checkpoint(policy, tmp_path / "checkpoint")
        policy.call("update", scored_batch(2))
        expected = policy.run(adapters)
    saved = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == expected[0].keys()
    assert all("lora_" in name for name, value in saved.items() if isinstance(value, TensorStorageMetadata))
    with policy_processes(2, config) as policy:
        policy.call("load_checkpoint", tmp_path / "checkpoint")
        policy.call("update", scored_batch(2))
        found = policy.run(adapters)
    for name, value in expected[0].items():
        np.testing.assert_array_equal(found[0][name], value, err_msg=name)


def test_exported_adapters_load_in_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    lora = LORA.model_copy(update={"export": "Adapter"})
    config = lora_config(tmp_path, lora=lora, base_model=str(tmp_path / "model"))
    with policy_processes(2, config) as policy:
        policy.call("update", scored_batch(1))
        logprobs = policy.run(token_logprobs, scored_batch(2))[0]
        policy.call("export_pretrained", tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], sorted(settings["target_modules"])) == (4, 8.0, sorted(LORA.targets))
    assert settings["base_model_name_or_path"] == str(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    batch = scored_batch(2)
    for i, found in enumerate(logprobs):
        if len(found):
            np.testing.assert_allclose(found, _logprobs(model, batch, i), atol=1e-5)


def test_dropout_acts_in_training_alone(tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"dropout": 0.5})
    config = lora_config(tmp_path, lora=lora)
    with policy_processes(1, config) as policy:
        policy.call("update", scored_batch(1))
        [first], [second] = (policy.run(token_logprobs, scored_batch(2)) for _ in range(2))
        [digest] = policy.run(weights_digest)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    with policy_processes(1, lora_config(tmp_path)) as policy:
        policy.call("update", scored_batch(1))
        assert policy.run(weights_digest) != [digest]


def test_dropout_enters_neither_ratios_nor_importance_weights(tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"dropout": 0.5})
    batch = scored_batch(2)
    with policy_processes(2, lora_config(tmp_path, lora=lora)) as policy:
        policy.call("update", scored_batch(1))  # until then, adapters have no effect
        [exact, _] = policy.run(token_logprobs, batch)
        [result, _] = policy.call("update", batch)
    finite = [np.isfinite(values) for values in batch.rollout_logprobs]
    difference = np.concatenate(
        [(one - other)[kept] for one, other, kept in zip(exact, batch.rollout_logprobs, finite, strict=True)]
    )
    assert result.metrics["logprob_diff_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    weights = np.minimum(np.exp(difference), 2.0)
    assert result.metrics["importance_weight_mean"] == pytest.approx(weights.mean(), rel=1e-4)
    share = weights.sum() ** 2 / (len(weights) * np.square(weights).sum())
    assert result.metrics["importance_ess"] == pytest.approx(share, rel=1e-4)
    assert result.metrics["ppo_kl"] == 0


@torch.no_grad()
def _logprobs(model: Any, batch: RolloutBatch, i: int) -> np.ndarray:
    prompt, response = batch.prompt_ids[i // batch.group_size], batch.response_ids[i]
    ids = torch.tensor(np.concatenate([prompt, response])).long()[None]
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, torch.tensor(response).long()[:, None])[:, 0].numpy()
