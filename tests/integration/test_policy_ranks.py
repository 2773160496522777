"""Any number of ranks and micro-batches gives the same update as one plain loop over the sequences."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rljob_client.errors import BadInput
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.algorithm.micro_batch import completions_with_tokens, split_updates, with_gradient
from rljob_trainer.algorithms.objective import LossMetrics
from rljob_trainer.policy.config import PolicyConfig, UpdateResult
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.policy.update import UpdateMetrics
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import (
    ALL_TERMS,
    RankProcesses,
    parameters,
    policy_config,
    policy_processes,
    scored_batch,
    tiny_config,
    tiny_model,
    weights_digest,
)

PLAIN: dict[str, Any] = {}

ADAMW_EPSILON = 1e-8
"""A gradient of this size or less is mostly rounding, and AdamW divides it by its own size."""


class PlainTraining:
    """The same algorithm by the book: one process, one sequence at a time, whole logits, no sharding, no chunks."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model)
        embedding = self.model.get_input_embeddings().weight
        decaying = [each for each in self.model.parameters() if each.dim() >= 2 and each is not embedding]
        others = [each for each in self.model.parameters() if each.dim() < 2 or each is embedding]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decaying, "weight_decay": config.algorithm.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.algorithm.learning_rate,
            betas=(config.algorithm.adam_beta1, config.algorithm.adam_beta2),
        )
        self.gradient_was_rounding = {name: np.zeros(p.shape, bool) for name, p in self.model.named_parameters()}
        """True for each weight whose gradient was only rounding in an update."""

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        completions = [i for i in range(len(batch)) if len(batch.response_ids[i])]
        halves = np.array_split(np.array(completions), self.config.algorithm.updates_per_step)
        with torch.no_grad():
            old = {i: self.distribution(self.model, batch, i)[0] for i in completions}
        losses, norms, drifts, mismatches = [], [], [], []
        for part in halves:
            self.optimizer.zero_grad()
            tokens = {i: torch.tensor(np.isfinite(batch.rollout_logprobs[i])) for i in part.tolist()}
            total = sum(int(kept.sum()) for kept in tokens.values())
            loss = torch.zeros(())
            with torch.no_grad():
                new = {i: self.distribution(self.model, batch, i)[0] for i in tokens}
            drifts.append(torch.cat([(old[i] - new[i])[kept] for i, kept in tokens.items()]).mean().item())
            mismatches.append(
                torch.cat(
                    [(old[i] - torch.tensor(batch.rollout_logprobs[i])).abs()[kept] for i, kept in tokens.items()]
                )
            )
            for i, kept in tokens.items():
                per_token = self.token_losses(batch, i, old[i])[kept]
                mean = self.config.algorithm.settings.loss_aggregation == "SequenceMean"
                loss = loss + (per_token.mean() / len(tokens) if mean else per_token.sum() / total)
            loss.backward()
            norms.append(
                float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.algorithm.max_grad_norm))
            )
            losses.append(loss.item())
            for name, parameter in self.model.named_parameters():
                size = parameter.grad.abs().numpy()
                self.gradient_was_rounding[name] |= (size > 0) & (size < ADAMW_EPSILON)
            self.optimizer.step()
        return {
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "ppo_kl": float(np.mean(drifts)),
            "logprob_diff_mean": float(np.mean([part.mean() for part in mismatches])),
            "logprob_diff_max": float(torch.cat(mismatches).max()),
        }

    def token_losses(self, batch: RolloutBatch, i: int, old: torch.Tensor) -> torch.Tensor:
        settings, advantage = self.config.algorithm, float(batch.advantages[i])
        clip = settings.settings
        logprobs, entropy = self.distribution(self.model, batch, i)
        ratio = torch.exp(logprobs - old)
        objective = -torch.min(ratio * advantage, ratio.clamp(1 - clip.clip_low, 1 + clip.clip_high) * advantage)
        if advantage < 0 and clip.dual_clip:
            objective = objective.clamp(max=-advantage * clip.dual_clip)
        weight = torch.exp(old - torch.tensor(batch.rollout_logprobs[i]).nan_to_num(neginf=0.0))
        if settings.importance_sampling.mode == "Truncate":
            weight = weight.clamp(max=settings.importance_sampling.cap)
        else:
            cap = settings.importance_sampling.cap
            weight = weight * ((weight >= 1 / cap) & (weight <= cap))
        with torch.no_grad():
            reference = self.distribution(self.reference, batch, i)[0]
        kl = torch.exp(reference - logprobs) - (reference - logprobs) - 1
        return weight * objective + settings.kl_coefficient * kl - settings.entropy_coefficient * entropy

    def distribution(self, model: torch.nn.Module, batch: RolloutBatch, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each response token of completion `i`."""
        prompt, response = batch.prompt_ids[i // batch.group_size], batch.response_ids[i]
        ids = torch.tensor(np.concatenate([prompt, response])).long()[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / self.config.algorithm.temperature
        logprobs = torch.log_softmax(logits, -1)
        return logprobs.gather(1, torch.tensor(response).long()[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (4, 2), pytest.param(4, 1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "tied", "loss", "updates_per_step"),
    [("qwen3", False, PLAIN, 1), ("llama", True, ALL_TERMS, 2)],
    ids=["untied-qwen3", "tied-llama-all-terms-two-updates"],
)
def test_ranks_and_micro_batches_give_the_update_of_a_plain_loop(
    tmp_path: Path, ranks: int, copies: int, kind: str, tied: bool, loss: dict[str, Any], updates_per_step: int
) -> None:
    model_dir = tiny_model(tmp_path / "model", kind, tied=tied)
    config = policy_config(
        model_dir,
        tmp_path / "run",
        **loss,
        updates_per_step=updates_per_step,
        temperature=0.7,
        max_grad_norm=0.5,
        memory=memory_plan(micro_batch_tokens=20, logprob_chunk_tokens=7, policy_copies=copies),
    )
    plain = PlainTraining(config)
    with policy_processes(ranks, config) as policy:
        for step in (1, 2):
            expected = plain.update(scored_batch(step))
            results: list[UpdateResult] = policy.call("update", scored_batch(step))
            for result in results:
                assert result.metrics == results[0].metrics
                assert result.metrics["micro_batches"] > 1
                assert {name: result.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
        trained = policy.run(parameters)[0]

    for name, parameter in plain.model.named_parameters():
        wanted = parameter.detach().numpy()
        # Rounding moves a weight by a part of the learning rate, and on another processor by another part.
        rounding = plain.gradient_was_rounding[name]
        assert rounding.mean() < 0.001, name
        np.testing.assert_allclose(trained[name][~rounding], wanted[~rounding], rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(trained[name], wanted, rtol=0, atol=config.algorithm.learning_rate, err_msg=name)
    assert trained.keys() == dict(plain.model.named_parameters()).keys()


@pytest.mark.parametrize(("ranks", "group_size"), [(1, 5), (2, 5), pytest.param(3, 9, marks=pytest.mark.long)])
def test_shared_prompts_change_an_update_by_rounding_alone(tmp_path: Path, ranks: int, group_size: int) -> None:
    config = tiny_config(tmp_path, **ALL_TERMS)
    batch = scored_batch(1, group_size=group_size, longest_prompt=24)
    with policy_processes(ranks, config) as policy:
        shared, repeated = (policy.run(_update_of, batch, shares) for shares in (True, False))
    assert sum(tokens for *_, tokens in shared) < 0.8 * sum(tokens for *_, tokens in repeated)
    for (metrics, gradients, _), (others, other_gradients, _) in zip(shared, repeated, strict=True):
        assert metrics == pytest.approx(others, rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(gradients, other_gradients, rtol=0, atol=1e-6 * np.abs(other_gradients).max())


OWN_LOSS = """
def sums(tokens, settings):
    lengths = tokens.sequence_sums(tokens.kept.float())
    return -tokens.advantages * tokens.sequence_sums(tokens.logprobs), {"lengths": lengths}
def broken(tokens, settings):
    return tokens.logprobs.sum()
"""


@pytest.mark.parametrize(("ranks", "copies"), [(3, 1), (5, 1), (4, 2)])
def test_every_rank_gathers_the_whole_weights_bit_for_bit(tmp_path: Path, ranks: int, copies: int) -> None:
    """Rows that the ranks do not divide evenly; of five ranks, one has no row of the smallest weights."""
    model_dir = tiny_model(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters()
    expected = {name: weight.detach().to(torch.bfloat16).view(torch.int16).numpy() for name, weight in whole}
    memory = memory_plan(policy_copies=copies)
    config = policy_config(model_dir, tmp_path / "run", dtype="bfloat16", memory=memory)
    with policy_processes(ranks, config) as policy:
        for gathered in policy.run(exported_bits):
            assert list(gathered) == list(expected)
            for name, weight in gathered.items():
                np.testing.assert_array_equal(weight, expected[name], err_msg=name)


def exported_bits(policy: PolicyRank) -> dict[str, np.ndarray]:
    return {name: weight.view(torch.int16).numpy().copy() for name, weight in policy.named_full_parameters()}


def test_a_loss_of_the_user_runs_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "own_loss_of_ranks.py").write_text(OWN_LOSS)
    model_dir = tiny_model(tmp_path / "model")

    def config(name: str) -> PolicyConfig:
        loss = f"own_loss_of_ranks:{name}"
        return policy_config(model_dir, tmp_path / name, loss=loss, task_directory=tmp_path, updates_per_step=2)

    found = []
    for ranks in (1, 2):
        with policy_processes(ranks, config("sums")) as policy:
            results: list[UpdateResult] = policy.call("update", scored_batch(1))
            found.append((results[0].metrics, policy.run(parameters)[0]))
    (alone, weights), (together, others) = found
    names = ("loss", "lengths", "grad_norm", "importance_ess")
    assert {name: together[name] for name in names} == pytest.approx({name: alone[name] for name in names}, rel=1e-4)
    assert alone["lengths"] > 1
    for name, values in weights.items():
        np.testing.assert_allclose(others[name], values, rtol=0, atol=1e-6, err_msg=name)
    refused = pytest.raises(BadInput, match=r"line 5\) as a tensor of \[5\]")
    with policy_processes(1, config("broken"), load=False) as policy, refused:
        policy.call("load")


def test_masked_responses_change_nothing(tmp_path: Path) -> None:
    """Neither the weights of other tokens, nor metrics."""
    batch = scored_batch(1)
    kept = np.arange(len(batch)) % 4 != 1
    nothing = [ids[: len(ids) * of] for ids, of in zip(batch.response_ids, kept, strict=True)]
    logprobs = [values[: len(ids)] for values, ids in zip(batch.rollout_logprobs, nothing, strict=True)]
    config = tiny_config(tmp_path, loss_aggregation="ConstantLength")
    digests = []
    for changed in (replace(batch, kept=kept), replace(batch, response_ids=nothing, rollout_logprobs=logprobs)):
        with policy_processes(1, config) as policy:
            policy.call("update", changed)
            digests += policy.run(weights_digest)
    assert digests[0] == digests[1]


def test_completions_without_advantage_are_skipped_without_effect(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, updates_per_step=2)
    batch = scored_batch(1, prompts=8)
    advantages = batch.advantages.copy()
    advantages[9:21] = 0
    batch = batch.scored(batch.rewards, advantages)
    with policy_processes(1, config) as policy:
        [all_gradients], [gradients] = (policy.run(_gradients, batch, skip) for skip in (False, True))
        [forwards] = policy.run(_forwards, batch)
        [result] = policy.call("update", batch)
        [again] = policy.call("update", replace(batch.scored(batch.rewards, 0 * advantages), step=2))
    largest = max(np.abs(gradient).max() for gradient in all_gradients.values())
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, all_gradients[name], rtol=0, atol=1e-6 * largest, err_msg=name)
    assert result.metrics["skipped_tokens"] == sum(map(len, batch.response_ids[9:21]))
    # In the first update, the policy's log-probabilities before the step are those of its own forward passes.
    assert forwards["without"] == forwards["micro_batches_of_second_update"] > 0
    assert forwards["with_gradient"] == result.metrics["micro_batches"] > forwards["without"]
    # Nothing has an advantage: one completion an update is left, so that there are metrics.
    assert again.metrics["micro_batches"] == 2
    assert again.metrics["grad_norm"] == 0
    assert again.metrics["entropy"] > 0


def _parts(policy: PolicyRank, batch: RolloutBatch) -> list[list[int]]:
    return split_updates(completions_with_tokens(batch), policy.config.algorithm.updates_per_step)


def _gradients(policy: PolicyRank, batch: RolloutBatch, skip: bool) -> dict[str, np.ndarray]:
    for part in _parts(policy, batch):
        processed = with_gradient(batch, part, policy.config.algorithm) if skip else part
        for micro_batch in policy._loaded.update.micro_batches(batch, part, processed):
            policy._loaded.update._backward(micro_batch, None)
    gradients = {}
    for name, parameter in policy._model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.numpy().copy()
    policy._optimizer.gradients.clear()
    return gradients


def _update_of(policy: PolicyRank, batch: RolloutBatch, shares: bool) -> tuple[dict[str, float], np.ndarray, int]:
    """Metrics, this rank's gradients, end to end, and its tokens."""
    update, completions = policy._loaded.update, completions_with_tokens(batch)
    policy._model.shares_prompts = shares
    micro_batches = list(update.micro_batches(batch, completions, completions))
    metrics = UpdateMetrics(detached=True)
    for micro_batch in micro_batches:
        metrics.add(update._backward(micro_batch, None))
    gradients = np.concatenate([gradient.numpy().copy() for gradient in policy._optimizer.gradients.all()])
    policy._optimizer.gradients.clear()
    return metrics.over_ranks(1, 1, {}), gradients, sum(each.input_ids.numel() for each in micro_batches)


def _forwards(policy: PolicyRank, batch: RolloutBatch) -> dict[str, int]:
    """The number of forward passes of an update with and without gradient, and of micro-batches in the second part."""
    counts = {"with_gradient": 0, "without": 0}

    def count(_module: object, _arguments: object, _output: object) -> None:
        counts["with_gradient" if torch.is_grad_enabled() else "without"] += 1

    hook = policy._model.register_forward_hook(count)
    part = _parts(policy, batch)[1]
    second = list(policy._loaded.update.micro_batches(batch, part, with_gradient(batch, part, policy.config.algorithm)))
    policy._loaded.update.run(batch)
    hook.remove()
    return {**counts, "micro_batches_of_second_update": len(second)}


def test_nothing_of_a_micro_batch_outlives_the_update(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with policy_processes(1, config) as policy:
        [[most_alive, alive_after]] = policy.run(_hidden_states_alive, scored_batch(1))
    assert most_alive == 1, "a micro-batch's hidden states were alive in the next one's forward"
    assert alive_after == 0


def _hidden_states_alive(policy: PolicyRank, batch: RolloutBatch) -> list[int]:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def remember(_module: object, _args: object, output: torch.Tensor) -> None:
        seen.append(weakref.ref(output))
        alive.append(sum(state() is not None for state in seen))

    final_norm = policy._model.causal_lm.base_model.norm
    final_norm.register_forward_hook(remember)
    policy.update(batch)
    assert len(seen) > 2
    return [max(alive), sum(state() is not None for state in seen)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    directory = tmp_path_factory.mktemp("two_ranks")
    config = tiny_config(directory, weight_decay=0.0)
    with policy_processes(2, config) as policy:
        yield policy


def test_a_step_of_empty_responses_changes_nothing(two_ranks: RankProcesses) -> None:
    batch = scored_batch(1)
    nothing = replace(
        batch,
        response_ids=[ids[:0] for ids in batch.response_ids],
        rollout_logprobs=[values[:0] for values in batch.rollout_logprobs],
    )
    before = two_ranks.run(weights_digest)
    metrics = two_ranks.call("update", nothing)[0].metrics
    assert two_ranks.run(weights_digest) == before, "the optimizer has no momentum yet"
    assert metrics["tokens"] == metrics["loss"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_gradient_that_is_not_finite_is_thrown_away_and_counted(two_ranks: RankProcesses) -> None:
    broken = scored_batch(1)
    broken.advantages[-1] = np.inf
    before = two_ranks.run(weights_digest)
    assert two_ranks.call("update", broken)[0].metrics["skipped_updates"] == 1
    assert two_ranks.run(weights_digest) == before
    assert two_ranks.call("update", scored_batch(2))[0].metrics["skipped_updates"] == 0
    assert two_ranks.run(weights_digest) != before


def test_nan_on_one_rank_makes_every_metric_not_finite(two_ranks: RankProcesses) -> None:
    for broken in (0, 1):
        for metrics in two_ranks.run(_metrics_over_ranks, broken):
            assert not np.isfinite(metrics["sum"])
            assert not np.isfinite(metrics["maximum"])
            assert metrics["count"] == 3


def _metrics_over_ranks(policy: PolicyRank, broken: int) -> dict[str, float]:
    value = torch.tensor(np.nan if policy.rank == broken else 1.0)
    metrics = UpdateMetrics(detached=True)
    metrics.add(LossMetrics(sums={"sum": value}, maxima={"maximum": value}))
    return metrics.over_ranks(1, 1, {"count": 2 + policy.rank})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trained_model_with_nan_is_not_written(tmp_path: Path, ranks: int) -> None:
    config = tiny_config(tmp_path)
    with policy_processes(ranks, config) as policy:
        policy.run(_break_a_weight)
        with pytest.raises(BadInput, match=r"NaN or infinity in 1 of \d+ tensors, such as model\.norm\.weight"):
            policy.call("export_pretrained", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def _break_a_weight(policy: PolicyRank) -> None:
    local(policy._model.causal_lm.model.norm.weight)[-1] = np.nan


def test_a_model_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = policy_config(tmp_path / "model", tmp_path / "run")
    with pytest.raises(BadInput, match=r"expected config\.json in the model directory"), policy_processes(1, config):
        pass


def gathered_after_each_micro_batch(policy: PolicyRank, batch: RolloutBatch) -> list[bool]:
    """State of the embedding after each micro-batch of an update: True if it is gathered."""
    found: list[bool] = []
    embedding = policy._model.causal_lm.get_input_embeddings()
    policy._loaded.update.after_micro_batch = lambda _number: found.append(not isinstance(embedding.weight, DTensor))
    policy.update(batch)
    return found


def test_embedding_and_head_are_gathered_once_in_an_update(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, updates_per_step=2)
    with policy_processes(2, config) as policy:
        for found in policy.run(gathered_after_each_micro_batch, scored_batch(1)):
            half = len(found) // 2
            assert found == [*[True] * (half - 1), False] * 2
