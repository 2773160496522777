"""Real vLLM engines in a Ray actor, fed by this process as the policy: after a sync both must compute the same."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rljob_api.algorithm import AlgorithmSpec
from rljob_testing.supported_models import TRAINED, EngineHost, Kind, compare, largest_difference, perturb
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.rollout.fast_decoding import VARIABLE
from rljob_trainer.rollout.lots import WholeGroups
from rljob_trainer.rollout.synced_weights import WeightsNotSynced
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.weight_sync.colocated import send_weights

TOLERANCE = 1e-4
TEMPERATURE = 0.7
GROUP_SIZE = 4
# 40 tokens fill a block of the prefix cache (32 tokens here): a stale one would show.
PROMPTS = [[4 + (i * j) % 40 for j in range(1, 41)] for i in range(1, 5)] + [[11]]
SEEDS = [100 * i for i in range(len(PROMPTS))]

MODELS = [
    pytest.param(f"random://{name}?initializerRange=0.3&tied={tied}", id=f"{name}-tied-{tied}")
    for name, tied in (("qwen3", "false"), ("llama", "true"))
]
"""The kinds of models in TRAINED have the other two."""


@pytest.fixture(scope="module")
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty, as in a new pod."""
    return tmp_path_factory.mktemp("vllm-cache")


@pytest.fixture(scope="module")
def host(vllm_cache: Path) -> Iterator[Any]:
    start_local_ray(cpus=2, gpus=0, object_store_bytes=200 << 20)
    try:
        # The actor's process imports this module for the class.
        variables = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))),
            "VLLM_CACHE_ROOT": str(vllm_cache),
        }
        runtime_env = {"env_vars": engine_environment("cpu") | variables}
        yield ray.remote(EngineHost).options(num_cpus=1, runtime_env=runtime_env).remote()
    finally:
        ray.shutdown()


@pytest.fixture
def start_engine(host: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, torch.nn.Module]]:
    def start(uri: str, environment: dict[str, str] | None = None, **settings: Any) -> tuple[Any, torch.nn.Module]:
        directory = resolve_model(uri, tmp_path_factory.getbasetemp())
        ray.get(host.restart.remote(config(directory, **settings), environment))
        return host, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    return start


def config(model_dir: Path, **settings: Any) -> RolloutConfig:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 32,
        "kv_cache_bytes": 16 << 20,
        "engine_args": {"block_size": 32},
    }
    of_algorithm = {name: settings.pop(name) for name in list(settings) if name in AlgorithmSpec.model_fields}
    algorithm = AlgorithmSpec(steps=1, **({"max_response_tokens": 12, "temperature": TEMPERATURE} | of_algorithm))
    return RolloutConfig(model_dir=model_dir, algorithm=algorithm, **(defaults | settings))


def sync(policy: torch.nn.Module, engine: Any, version: int, *, bucket_bytes: int = 100_000) -> None:
    send_weights(policy.named_parameters(), [engine], version, bucket_bytes, rank=0)


def generate(engine: Any) -> list[Completion]:
    completions: list[Completion] = ray.get(engine.generate.remote(PROMPTS, GROUP_SIZE, SEEDS))
    return completions


def difference(policy: torch.nn.Module, completions: list[Completion]) -> float:
    return largest_difference(policy, PROMPTS, completions, TEMPERATURE)


@pytest.mark.parametrize("uri", MODELS)
def test_after_every_sync_the_engine_computes_what_the_policy_does(start_engine: Any, uri: str) -> None:
    engine, policy = start_engine(uri)
    perturb(policy, seed=1)
    sync(policy, engine, 1)
    assert difference(policy, generate(engine)) <= TOLERANCE

    perturb(policy, seed=2)
    assert difference(policy, generate(engine)) > 0.1, "the perturbation is too small to see stale weights"
    sync(policy, engine, 2, bucket_bytes=1 << 30)
    assert difference(policy, generate(engine)) <= TOLERANCE
    assert ray.get(engine.weight_version.remote()) == 2
    assert ray.get(engine.keeps_weights_as_loaded.remote()), "on a GPU, it would load them in place"


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.model_type)
def test_policy_and_engine_agree_in_every_kind_that_trains(host: Any, kind: Kind, tmp_path: Path) -> None:
    found = compare(kind.write(tmp_path), host)
    assert found.holds, found


def test_an_engine_refuses_to_generate_until_one_sync_is_complete(start_engine: Any) -> None:
    engine, policy = start_engine("random://qwen3?initializerRange=0.3&tied=true")
    with pytest.raises(WeightsNotSynced, match="it has never received weights"):
        generate(engine)

    sync(policy, engine, 1)
    generate(engine)

    perturb(policy, seed=3)
    parameters = list(policy.named_parameters())
    with pytest.raises(WeightsNotSynced, match="1 of 24 weights missing"):
        send_weights(parameters[:-1], [engine], 2, 100_000, rank=0)
    with pytest.raises(WeightsNotSynced, match="did not complete"):
        generate(engine)

    sync(policy, engine, 2)
    assert difference(policy, generate(engine)) <= TOLERANCE


@pytest.mark.parametrize("end", ["the sender dies", "the engine fails"])
def test_a_full_sync_heals_one_that_broke_in_the_middle_of_a_layer(start_engine: Any, end: str) -> None:
    engine, policy = start_engine("random://llama?initializerRange=0.3")
    sync(policy, engine, 1)

    # Enough to have one layer loaded whole, the next by a third of its fused qkv_proj.
    old = [(name, parameter.detach().clone()) for name, parameter in policy.named_parameters()]
    cut = [name for name, _ in old].index("model.layers.1.self_attn.k_proj.weight")

    def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from old[:cut]
        if end == "the sender dies":
            raise ConnectionError
        yield old[cut][0], torch.zeros(3, 5)

    with pytest.raises((ConnectionError, ray.exceptions.RayTaskError)):
        send_weights(breaking_off(), [engine], 2, 1, rank=0)
    with pytest.raises(WeightsNotSynced, match="did not complete"):
        generate(engine)

    perturb(policy, seed=4)
    sync(policy, engine, 3)
    assert difference(policy, generate(engine)) <= TOLERANCE


def test_generation_repeats_with_its_seeds_and_ends_as_asked(start_engine: Any) -> None:
    engine, policy = start_engine("random://qwen3", temperature=1.0)
    sync(policy, engine, 1)
    completions = generate(engine)
    assert completions == generate(engine)
    assert len(completions) == len(PROMPTS) * GROUP_SIZE
    assert len({tuple(c.token_ids) for c in completions[:GROUP_SIZE]}) > 1, "a group's samples must differ"
    assert all(math.isfinite(logprob) and logprob <= 0 for c in completions for logprob in c.logprobs)

    eos = 2
    assert all(c.finished == (c.token_ids[-1] == eos) for c in completions)
    assert all(c.finished or len(c.token_ids) == 12 for c in completions)
    assert any(c.finished for c in completions), "no response ended by itself: the test saw only one half"
    assert all("<eos>" not in c.text for c in completions)

    engine, policy = start_engine("random://qwen3", ignore_end_of_sequence=True)
    sync(policy, engine, 1)
    assert all(len(c.token_ids) == 12 and not c.finished for c in generate(engine))


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_a_truncated_distribution_keeps_the_probabilities_of_the_whole_one(
    start_engine: Any, temperature: float
) -> None:
    """The policy does not truncate: else the importance weights would be smaller by the mass that was cut off."""
    uri = "random://qwen3?initializerRange=0.3"
    engine, policy = start_engine(uri, temperature=temperature)
    sync(policy, engine, 1)
    whole = generate(engine)
    engine, policy = start_engine(uri, temperature=temperature, top_k=3, top_p=0.9, min_p=0.05)
    sync(policy, engine, 1)
    completions = generate(engine)
    assert largest_difference(policy, PROMPTS, completions, temperature) <= TOLERANCE
    assert mean_logprob(completions) > mean_logprob(whole) + 0.2, "the test needs tokens that are never sampled"
    assert completions == generate(engine)
    first = [completion.token_ids[0] for completion in completions[:GROUP_SIZE]]
    assert len(set(first)) <= 3


def test_an_engine_in_16_bits_computes_its_logits_in_float32(start_engine: Any) -> None:
    """All layers are the identity, so that only the output projection can differ."""
    engine, policy = start_engine("random://qwen3?tied=false", dtype="bfloat16", temperature=1.0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.mul_(0.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        policy.lm_head.weight.mul_(100)
    policy.to(torch.bfloat16)
    sync(policy, engine, 1)
    differences, largest = [], 0.0
    for index, completion in enumerate(generate(engine)):
        prompt, response = PROMPTS[index // GROUP_SIZE], list(completion.token_ids)
        with torch.no_grad():
            hidden = policy.base_model(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
            logits = hidden.float() @ policy.lm_head.weight.float().T
        largest = max(largest, float(logits.abs().max()))
        ours = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        differences.append((ours - torch.tensor(completion.logprobs)).abs())
    assert largest > 8, "the test needs logits that 16 bits round by 1/64"
    assert float(torch.cat(differences).mean()) < 1 / 256


def mean_logprob(completions: list[Completion]) -> float:
    values = [logprob for completion in completions for logprob in completion.logprobs]
    return sum(values) / len(values)


def test_a_response_ends_with_its_stop_string(start_engine: Any) -> None:
    """Its tokens, text and log-probabilities include the string; a special token is found by its text."""
    engine, policy = start_engine("random://qwen3", temperature=1.0)
    sync(policy, engine, 1)
    whole = generate(engine)
    texts = [completion.text for completion in whole if len(completion.text) > 3]
    stop = [texts[0][2:4], texts[1][1], "<bos>"]
    engine, policy = start_engine("random://qwen3", temperature=1.0, stop=stop)
    assert not ray.get(engine.uses_fast_decoding.remote())
    sync(policy, engine, 1)
    stopped = generate(engine)
    assert largest_difference(policy, PROMPTS, stopped, 1.0) <= TOLERANCE
    ended, bos = 0, 1
    for before, after in zip(whole, stopped, strict=True):
        count = len(after.token_ids)
        assert list(after.token_ids) == list(before.token_ids)[:count]
        assert bos not in after.token_ids[:-1]
        assert not any(string in after.text[:-1] for string in stop)
        if count < len(before.token_ids):
            assert after.finished
            assert after.text.endswith(tuple(stop)) or after.token_ids[-1] == bos
            ended += 1
    assert ended > 1
    assert any(completion.token_ids[-1] == bos for completion in stopped), "the test needs a special token"


def groups(*places: int) -> WholeGroups:
    return WholeGroups(places, [PROMPTS[n] for n in places], GROUP_SIZE, [SEEDS[n] for n in places])


def test_groups_that_join_others_get_the_same_completions(start_engine: Any) -> None:
    engine, policy = start_engine("random://qwen3", max_num_seqs=6)
    sync(policy, engine, 1)
    expected = generate(engine)
    calls = [(groups(4, 2), 6), (groups(0), 6), (groups(3, 1), 6), (groups(), 0), (groups(), 0)]
    reports = [ray.get(engine.generate_groups.remote(work, left)) for work, left in calls]
    found = dict(result for report in reports for result in report)
    assert [completion for place in range(len(PROMPTS)) for completion in found[place]] == expected
    assert sum(map(bool, reports)) > 1, "groups are reported while others are generated"


def test_groups_of_earlier_weights_are_dropped_by_a_sync(start_engine: Any) -> None:
    engine, policy = start_engine("random://qwen3")
    sync(policy, engine, 1)
    expected = generate(engine)
    ray.get(engine.generate_groups.remote(groups(0, 1, 2, 3, 4), GROUP_SIZE * len(PROMPTS)))
    assert ray.get(engine.count_unfinished.remote()) > 0, "the test needs groups that are not complete"
    sync(policy, engine, 2)
    assert ray.get(engine.count_unfinished.remote()) == 0
    assert generate(engine) == expected


def test_the_fast_path_returns_the_bits_of_vllm(start_engine: Any) -> None:
    found = []
    # Of 20 sequences, 6 at a time: prompts are prefilled while responses are generated.
    for value in ("0", "1"):
        engine, policy = start_engine("random://qwen3", {VARIABLE: value}, max_num_seqs=6)
        assert ray.get(engine.uses_fast_decoding.remote()) == (value == "1")
        sync(policy, engine, 1)
        found.append(generate(engine))
    assert found[0] == found[1]


def test_vllm_starts_no_process_to_look_at_the_models_class(start_engine: Any, vllm_cache: Path) -> None:
    start_engine("random://qwen3")
    assert not (vllm_cache / "modelinfos").exists(), "what such a process found is kept there"
