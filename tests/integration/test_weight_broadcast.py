"""Real vLLM engines in two Ray actors, to which this process broadcasts weights as the policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rljob_api.algorithm import AlgorithmSpec
from rljob_trainer.errors import WorkerLost
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.roles.actor import long_imports
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.rollout.synced_weights import WeightsNotSynced
from rljob_trainer.rollout.topology_engines import DisaggregatedEngine
from rljob_trainer.weight_sync import broadcast
from rljob_trainer.weight_sync.broadcast import WeightBroadcaster

PROMPTS, SEEDS = [[4, 5, 6], [7, 8]], [1, 2]
BUCKET_BYTES = 50_000
CUT = "model.layers.1.self_attn.k_proj.weight"
"""A third of a fused layer, after a layer that is loaded whole."""


class FailingReceiver(DisaggregatedEngine):
    """An engine that can be made to fail while it receives."""

    def __init__(self, rank: int, config: RolloutConfig) -> None:
        super().__init__(rank, config)
        self.start()
        self.failing = False

    def import_engine(self) -> None:
        with long_imports():
            super().import_engine()

    def fail_next(self) -> None:
        self.failing = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.failing:
            self.failing = False
            raise MemoryError("no memory for a bucket")
        super().update_weights(update_info)

    def weight_version(self) -> int | None:
        return self._weights.version

    def logprobs(self) -> list[list[float]]:
        return [list(completion.logprobs) for completion in self.generate(PROMPTS, 2, SEEDS)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("random://llama?initializerRange=0.3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_local_ray(cpus=4, gpus=0, object_store_bytes=200 << 20)
    yield
    ray.shutdown()


def start_engine(model_dir: Path, rank: int) -> Any:
    algorithm = AlgorithmSpec(steps=1, max_response_tokens=8)
    config = RolloutConfig(model_dir, "cpu", "float32", 64, 8, 16 << 20, algorithm, engine_args={"block_size": 32})
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent), "GLOO_SOCKET_IFNAME": "lo"}
    runtime_env = {"env_vars": engine_environment("cpu") | variables}
    return ray.remote(FailingReceiver).options(num_cpus=1, runtime_env=runtime_env).remote(rank, config)


@pytest.fixture(scope="module")
def engines(cluster: None, model_dir: Path) -> list[Any]:
    started = [start_engine(model_dir, rank) for rank in range(2)]
    ray.get([engine.weight_version.remote() for engine in started])
    return started


@pytest.fixture
def broadcaster(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightBroadcaster]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = WeightBroadcaster("cpu")
    yield made
    made.leave()


@pytest.fixture
def policy(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def perturbed(policy: Any, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: p.detach() + 0.1 * torch.randn(p.shape, generator=random) for name, p in policy.named_parameters()}


def send(broadcaster: WeightBroadcaster, engines: list[Any], weights: dict[str, torch.Tensor], version: int) -> None:
    broadcaster.send(iter(weights.items()), engines, version, BUCKET_BYTES)


def generated(engines: list[Any]) -> list[list[list[float]]]:
    found: list[list[list[float]]] = ray.get([engine.logprobs.remote() for engine in engines])
    return found


def versions(engines: list[Any]) -> list[int | None]:
    found: list[int | None] = ray.get([engine.weight_version.remote() for engine in engines])
    return found


def test_engines_generate_only_with_all_weights_of_one_version(
    engines: list[Any], broadcaster: WeightBroadcaster, policy: Any
) -> None:
    assert versions(engines) == [None, None], "an engine has read weights before the first sync"
    with pytest.raises(WeightsNotSynced, match="it has never received weights"):
        generated(engines)
    first, second = perturbed(policy, 1), perturbed(policy, 2)
    send(broadcaster, engines, first, 1)
    assert versions(engines) == [1, 1]
    of_first, again = generated(engines)
    assert of_first == again

    missing = {name: weight for name, weight in second.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsNotSynced, match=r"1 of \d+ weights missing \(model\.norm\.weight"):
        send(broadcaster, engines, missing, 2)
    with pytest.raises(WeightsNotSynced, match="did not complete"):
        generated(engines)

    send(broadcaster, engines, second, 3)
    assert generated(engines)[0] != of_first
    send(broadcaster, engines, first, 4)
    assert generated(engines) == [of_first, of_first], "weights of another version are left"


@pytest.mark.parametrize("who", ["the policy", "an engine"])
def test_a_sync_that_fails_half_way_needs_a_full_resend(
    engines: list[Any], broadcaster: WeightBroadcaster, policy: Any, who: str
) -> None:
    old, new = perturbed(policy, 3), perturbed(policy, 4)
    send(broadcaster, engines, new, 1)
    expected = generated(engines)
    send(broadcaster, engines, old, 2)

    def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in old.items():
            if name == CUT:
                if who == "the policy":
                    raise MemoryError("no memory to gather a weight")
                ray.get(engines[1].fail_next.remote())
            yield name, weight

    with pytest.raises((MemoryError, ray.exceptions.RayTaskError), match="no memory"):
        broadcaster.send(breaking_off(), engines, 3, 1)
    for engine in engines:
        with pytest.raises(WeightsNotSynced, match="did not complete"):
            generated([engine])
    send(broadcaster, engines, new, 4)
    assert generated(engines) == expected


def test_an_engine_that_dies_is_named_and_its_successor_joins(
    engines: list[Any],
    broadcaster: WeightBroadcaster,
    policy: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = perturbed(policy, 5)
    send(broadcaster, engines, weights, 1)
    expected = generated(engines)

    def while_it_dies() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            if name == CUT:
                ray.kill(engines[1], no_restart=True)
            yield name, weight

    monkeypatch.setattr(broadcast, "_LOST_ENGINE_SECONDS", 300.0)  # Ray notices later on a busy machine
    with pytest.raises(WorkerLost, match="rollout-1 died while receiving the weights"):
        broadcaster.send(while_it_dies(), engines, 2, 1)
    engines[1] = start_engine(model_dir, 1)
    send(broadcaster, engines, weights, 3)
    assert generated(engines) == expected
