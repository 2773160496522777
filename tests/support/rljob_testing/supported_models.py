"""Tiny models of many kinds with random weights, and the difference of policy and engine on each.

Ray and vLLM must be installed. One process runs all engines, one after the other: importing vLLM is what takes long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rljob_api.algorithm import AlgorithmSpec
from rljob_testing.policy_models import read_policy_model
from rljob_trainer.models.random_model import write_character_tokenizer
from rljob_trainer.policy.model import PolicyModel
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.rollout.topology_engines import ColocatedEngine
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.weight_sync.colocated import send_weights


class EngineHost(ColocatedEngine):
    """Builds one engine after another in one process, because importing vLLM takes long."""

    def __init__(self) -> None:
        self._llm = None

    def restart(self, config: RolloutConfig, environment: Mapping[str, str] | None = None) -> None:
        """Start an engine in place of the last one. `environment`: variables to set before."""
        self.shutdown()
        os.environ |= environment or {}
        super().__init__(0, config)
        self.start()

    def keeps_weights_as_loaded(self) -> bool:
        """`engine_side.is_kept_as_loaded` of the engine's model."""
        from rljob_trainer.weight_sync.engine_side import is_kept_as_loaded

        return all(self._llm.apply_model(is_kept_as_loaded))

    def count_unfinished(self) -> int:
        """`unfinished_sequences`, for callers in other processes."""
        return self.unfinished_sequences

    def uses_fast_decoding(self) -> bool:
        return self._fast_decoding

    def weight_version(self) -> int | None:
        return self._weights.version


def perturb(policy: torch.nn.Module, seed: int) -> None:
    """Change every weight, so that a test fails if an engine keeps its old weights."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))


def largest_difference(
    policy: torch.nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float
) -> float:
    """Largest |log-probability of the engine − of the policy|, in nats, over all tokens of all completions; NaN if one
    of them is NaN.

    `policy`: a model of transformers. `completions`: group-major, equally many for each prompt.
    """
    group_size, differences = len(completions) // len(prompts), [torch.zeros(1)]
    for index, completion in enumerate(completions):
        prompt, response = list(prompts[index // group_size]), list(completion.token_ids)
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        differences.append((expected - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(differences).max())


TOLERANCE = 1e-4
"""Largest difference of a token's log-probability between policy and engine, in nats, in float32."""

LEAST_CHANGE = 0.1
"""Change of some log-probability by an update, in nats, from which stale weights would be noticed."""

_VOCABULARY, _POSITIONS, _BUCKET_BYTES, _LEARNING_RATE = 64, 128, 200_000, 0.01
_PROMPTS = [[4 + (i * j) % 40 for j in range(1, 41)] for i in range(1, 4)] + [[11]]
"""40 tokens are more than a block of the KV cache and more than the sliding windows below."""

_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": _POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_Sample = tuple[list[int], Completion]
"""A prompt and a response to it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model, as `model_type` names it."""

    name: str
    """Names of the models, for messages."""
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the tiny shape."""
    refused: str | None = None
    """Part of the message with which it is refused; None if it trains."""

    def config(self, **changes: Any) -> Any:
        """The configuration of transformers, with `changes` of the tiny shape."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **(_SHAPE | self.changes | changes))

    def write(self, directory: Path) -> Path:
        """Write configuration, random weights and tokenizer into `directory`, which must exist."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # biases and norms that are not their initial zeros and ones
                    parameter.add_(0.1 * torch.randn(parameter.shape))
                assert torch.isfinite(parameter).all(), name
        model.save_pretrained(directory)
        write_character_tokenizer(directory, vocabulary=_VOCABULARY, max_positions=_POSITIONS)
        return directory


_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

KINDS = (
    Kind("Llama 2, 3", "llama", {"rope_parameters": _LLAMA_3_ROPE}),
    Kind("Qwen2, Qwen2.5", "qwen2", {"tie_word_embeddings": True}),
    Kind("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    Kind("Mistral", "mistral", {"sliding_window": 16}),
    Kind("Gemma", "gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    Kind("Gemma 2", "gemma2", refused="final_logit_softcapping"),
    Kind(
        "Gemma 3, text",
        "gemma3_text",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "initializer_range": 0.05,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Kind("Phi-1, Phi-2", "phi", refused="lm_head"),
    Kind("Phi-3, Phi-4", "phi3", {"sliding_window": None}),
    Kind("OLMo 2", "olmo2"),
    Kind("SmolLM3", "smollm3", {"no_rope_layer_interval": 2}),
    Kind(
        "Qwen3-MoE",
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        refused="mixture of experts",
    ),
    Kind("Mixtral", "mixtral", {"num_local_experts": 4}, refused="mixture of experts"),
)

TRAINED = tuple(kind for kind in KINDS if kind.refused is None)


@contextmanager
def engine_host() -> Iterator[Any]:
    """A Ray actor in which engines run."""
    import ray

    start_local_ray(cpus=2, gpus=0, object_store_bytes=200 << 20)
    try:
        runtime_env = {"env_vars": engine_environment("cpu") | {"OMP_NUM_THREADS": "1"}}
        yield ray.remote(EngineHost).options(num_cpus=1, runtime_env=runtime_env).remote()
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Log-probabilities of an engine compared with those of the policy that sends it weights, in nats."""

    first: float
    """Largest difference after the first sync."""
    updated: float
    """Largest difference after an update of the policy and another sync."""
    change: float
    """Largest change of the policy's log-probabilities by the update."""

    @property
    def largest(self) -> float:
        return max(self.first, self.updated)

    @property
    def holds(self) -> bool:
        """Equal to `TOLERANCE`, with an update that is large enough to notice stale weights."""
        return self.first <= TOLERANCE and self.updated <= TOLERANCE and self.change >= LEAST_CHANGE


def compare(directory: Path, host: Any) -> Agreement:
    """Send the policy's weights to an engine, generate, update the policy by AdamW, and do both again, as in training.

    `host`: an actor of the class `EngineHost`. The model in `directory` has to be one that trains.
    """
    import ray

    config = RolloutConfig(
        model_dir=directory,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        algorithm=AlgorithmSpec(steps=1, max_response_tokens=12, ignore_end_of_sequence=True),
    )
    ray.get(host.restart.remote(config))
    with _one_thread():
        policy = read_policy_model(directory, temperature=1.0, chunk_tokens=64)
        samples = _synced_and_generated(policy, host, 1)
        first = _largest_difference(policy, samples)
        before = [_logprobs(policy, sample).detach() for sample in samples]
        _update(policy, samples)
        after = [_logprobs(policy, sample).detach() for sample in samples]
        updated = _largest_difference(policy, _synced_and_generated(policy, host, 2))
    change = float((torch.cat(after) - torch.cat(before)).abs().max())
    return Agreement(first, updated, change)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small take longer with several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _synced_and_generated(policy: PolicyModel, host: Any, version: int) -> list[_Sample]:
    import ray

    send_weights(policy.causal_lm.named_parameters(), [host], version, _BUCKET_BYTES, rank=0)
    completions = ray.get(host.generate.remote(_PROMPTS, 2, list(range(len(_PROMPTS)))))
    prompts = [prompt for prompt in _PROMPTS for _ in range(2)]
    return list(zip(prompts, completions, strict=True))


def _update(policy: PolicyModel, samples: list[_Sample]) -> None:
    """One step of AdamW for the first response of each group, and against the second."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=_LEARNING_RATE)
    for index, sample in enumerate(samples):
        advantage = 1 if index % 2 == 0 else -1
        (-advantage * _logprobs(policy, sample).mean()).backward()
    optimizer.step()


def _largest_difference(policy: PolicyModel, samples: list[_Sample]) -> float:
    ours = torch.cat([_logprobs(policy, sample).detach() for sample in samples])
    theirs = torch.cat([torch.tensor(list(completion.logprobs)) for _, completion in samples])
    return float((ours - theirs).abs().max())


def _logprobs(policy: PolicyModel, sample: _Sample) -> torch.Tensor:
    """Log-probabilities of the tokens of the response, [T] float32."""
    prompt, completion = sample
    tokens = torch.tensor([*prompt, *completion.token_ids])
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
    logprobs: torch.Tensor = policy(tokens[None], rows, tokens[len(prompt) :])[0]
    return logprobs


def architecture(directory: Path) -> str:
    """The class that the model's configuration names."""
    return str(json.loads((directory / "config.json").read_text())["architectures"][0])
