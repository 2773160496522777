"""The arguments of an engine, which are compared with vLLM's own before vLLM is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout.config import (
    OF_SPECULATION,
    SET_BY_TRAINER,
    RolloutConfig,
    engine_arguments,
    engine_environment,
    graph_sizes,
    peer_environment,
)
from rljob_trainer.rollout.engine_fields import (
    engine_args_problems,
    fields_in,
    installed_engine_fields,
    installed_values,
    literal_in,
    require_engine_args,
)
from rljob_trainer.runtime.requirements import KV_CACHE_DTYPE, QUANTIZATION

VLLM_ARGUMENTS = {
    "block_size",
    "compilation_config",
    "max_num_seqs",
    "speculative_config",
    "dtype",
    "model",
    "load_format",
    "weight_transfer_config",
}


def arguments(**settings: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "model_dir": Path("model"),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_bytes": 1 << 20,
        "algorithm": AlgorithmSpec(steps=1),
    }
    return engine_arguments(RolloutConfig(**(defaults | settings)), VLLM_ARGUMENTS)


@pytest.mark.parametrize(
    ("device", "level", "sleeps"), [("cuda", 0, False), ("cuda", 1, True), ("cuda", 2, True), ("cpu", 2, False)]
)
def test_sleep_mode_is_on_only_if_the_engine_sleeps(device: str, level: int, sleeps: bool) -> None:
    assert arguments(device=device, sleep_level=level)["enable_sleep_mode"] is sleeps


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_log_probabilities_are_of_the_whole_distribution_at_the_temperature(truncation: dict[str, Any]) -> None:
    """Those of vLLM are without temperature, or with temperature and truncation."""
    algorithms = [AlgorithmSpec(steps=1, temperature=0.5, **changes) for changes in ({}, truncation)]
    whole, cut = (arguments(algorithm=each) for each in algorithms)
    assert (whole["logprobs_mode"], cut["logprobs_mode"]) == ("processed_logprobs", "raw_logprobs")
    configs = [RolloutConfig(Path("model"), "cpu", "float32", 1, 1, 1, each) for each in algorithms]
    assert [config.logit_scale for config in configs] == [1.0, 2.0]


def test_logits_are_in_float32_unless_the_weights_have_8_bits() -> None:
    assert arguments(dtype="bfloat16")["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments(quantization="fp8_per_tensor")["hf_overrides"] == {"head_dtype": "model"}


def test_an_engine_has_random_weights_and_the_logprobs_of_its_policy() -> None:
    on_cpu, on_gpu = arguments(device="cpu"), arguments(device="cuda")
    assert (on_cpu["load_format"], on_cpu["logprobs_mode"]) == ("dummy", "processed_logprobs")
    assert on_cpu["enforce_eager"] is True
    assert "enforce_eager" not in on_gpu, "CUDA graphs stay on"
    assert on_gpu["gpu_memory_utilization"] <= 0.01, "a GPU in use does not stop the start"
    assert (on_cpu["quantization"], on_cpu["kv_cache_dtype"]) == (None, "auto")
    in_8_bits = arguments(device="cuda", quantization="fp8_per_block", kv_cache_dtype="fp8")
    assert (in_8_bits["quantization"], in_8_bits["kv_cache_dtype"]) == ("fp8_per_block", "fp8")


def test_cuda_graphs_are_few_and_reach_the_largest_batch() -> None:
    assert graph_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert (graph_sizes(1), graph_sizes(2000)[-2:]) == ([1], [384, 512])
    graphs = arguments(device="cuda", max_num_seqs=3)["compilation_config"]
    assert graphs == {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 3]}
    own = {"cudagraph_mode": "NONE"}
    assert arguments(device="cuda", engine_args={"compilation_config": own})["compilation_config"] == own


def test_processes_of_an_engine_see_their_peers_gpus_for_vllms_own_all_reduce() -> None:
    shared = arguments(device="cuda", tensor_parallel_size=2)
    assert shared["tensor_parallel_size"] == 2
    assert not shared.get("disable_custom_all_reduce")
    assert peer_environment("cuda", 2) == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert peer_environment("cuda", 1) == peer_environment("cpu", 2) == {}
    assert engine_environment("cuda")["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    assert shared["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}
    assert "pass_config" not in arguments(device="cuda")["compilation_config"]
    assert engine_environment("cuda")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "vLLM's processes outlive their parent"


def test_the_users_engine_arguments_replace_defaults() -> None:
    assert arguments(engine_args={"block_size": 32, "max_num_seqs": 3})["max_num_seqs"] == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("load_format", "expected no load_format"),
        ("dtype", "expected no dtype"),
        ("weight_transfer_config", "expected no weight_transfer_config"),
        ("speculative_config", "training needs exact log-probabilities"),
        ("blok_size", "found blok_size; remove it"),
    ],
)
def test_arguments_that_the_trainer_sets_or_vllm_lacks_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        arguments(engine_args={name: "auto"})


SOURCE = """
import torch

@dataclass
class EngineArgs:
    enforce_eager: bool = False
    block_size: int | None = None
    swap_space: float = 4
    served_model_name: str | list[str] | None = None
    attention_backend: Backends | str | None = None
    scheduler: SchedulerOption = "auto"
    mode: Literal["fast", "exact"] | None = None
    overrides: 'dict[str, Any] | Overrides' = None

    def method(self) -> int:
        local: int = 3
        return local
"""
FIELDS = fields_in(SOURCE)


def test_the_fields_are_those_of_the_class() -> None:
    assert list(FIELDS) == [
        *("enforce_eager", "block_size", "swap_space", "served_model_name"),
        *("attention_backend", "scheduler", "mode", "overrides"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enforce_eager", True, None),
        ("block_size", 16, None),
        ("block_size", None, None),
        ("swap_space", 4, None),
        ("served_model_name", ["a", "b"], None),
        ("attention_backend", "fast", None),
        ("scheduler", "anything of a type that only vLLM knows", None),
        ("mode", "fast", None),
        ("overrides", {"a": 1}, None),
        ("enforce_eager", "yes", "expected bool, found 'yes'"),
        ("block_size", "16", "expected int | None, found '16'"),
        ("block_size", True, "expected int | None, found True"),
        ("swap_space", "4GB", "expected float, found '4GB'"),
        ("mode", "slow", "expected Literal['fast', 'exact'] | None, found 'slow'"),
        ("enforce_eagerly", True, "is not an engine argument of the installed vLLM: did you mean enforce_eager?"),
        ("zzz", True, "is not an engine argument of the installed vLLM: remove it"),
        ("dtype", "half", "expected no such argument: the trainer sets this argument; remove it"),
        (
            "hf_overrides",
            {"rope_theta": 1.0},
            "expected no such argument: it would change the engine but",
        ),
    ],
)
def test_unknown_or_refused_names_and_wrong_types_are_found(name: str, value: Any, message: str | None) -> None:
    problems = engine_args_problems({name: value}, FIELDS)
    assert problems.keys() == ({name} if message else set())
    assert problems.get(name, "").startswith(message or "")


def test_the_values_are_those_of_the_literal() -> None:
    source = (
        'from typing import Literal\nOther = Literal["a"]\nNames = Literal[\n    "b",\n    # a comment\n    "c",\n]\n'
    )
    assert literal_in(source, "Names") == ["b", "c"]
    assert literal_in(source, "Absent") == []


def test_the_installed_vllm_has_every_form_of_8_bits() -> None:
    for argument, names in (("quantization", QUANTIZATION), ("kv_cache_dtype", KV_CACHE_DTYPE)):
        values = installed_values(argument)
        assert values is not None, "the tests' environment has vLLM"
        assert {name for name in names.values() if name is not None} <= set(values)


def test_the_installed_vllm_is_read() -> None:
    fields = installed_engine_fields()
    assert fields is not None, "the tests' environment has vLLM"
    assert {"enforce_eager", "max_num_seqs", "weight_transfer_config"} <= fields.keys()
    assert fields.keys() >= SET_BY_TRAINER | OF_SPECULATION
    require_engine_args({"enforce_eager": True, "max_num_batched_tokens": 2048})
    with pytest.raises(BadInput, match=r"rollout\.engineArgs\.enforce_eagerly: .* did you mean enforce_eager\?"):
        require_engine_args({"enforce_eagerly": True})
