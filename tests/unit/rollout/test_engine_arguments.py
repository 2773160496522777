from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.rollout.config import RolloutConfig, engine_arguments, engine_environment, graph_sizes

VLLM_ARGUMENTS = {
    "block_size",
    "compilation_config",
    "max_num_seqs",
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
        "max_response_tokens": 16,
    }
    return engine_arguments(RolloutConfig(**(defaults | settings)), VLLM_ARGUMENTS)


def test_weights_are_not_read_and_logprobs_match_the_policy() -> None:
    assert arguments()["load_format"] == "dummy"
    assert arguments()["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize(
    ("device", "level", "sleeps"), [("cuda", 0, False), ("cuda", 1, True), ("cuda", 2, True), ("cpu", 2, False)]
)
def test_sleep_mode_is_on_only_if_the_engine_sleeps(device: str, level: int, sleeps: bool) -> None:
    assert arguments(device=device, sleep_level=level)["enable_sleep_mode"] is sleeps


def test_8_bit_weights_and_keys_are_asked_for_only_if_set() -> None:
    assert (arguments()["quantization"], arguments()["kv_cache_dtype"]) == (None, "auto")
    in_8_bits = arguments(device="cuda", quantization="fp8_per_block", kv_cache_dtype="fp8")
    assert (in_8_bits["quantization"], in_8_bits["kv_cache_dtype"]) == ("fp8_per_block", "fp8")


def test_cuda_graphs_stay_on_and_a_gpu_in_use_does_not_stop_the_start() -> None:
    on_gpu = arguments(device="cuda")
    assert "enforce_eager" not in on_gpu
    assert on_gpu["gpu_memory_utilization"] <= 0.01
    assert arguments(device="cpu")["enforce_eager"] is True


def test_cuda_graphs_are_few_and_reach_the_largest_batch() -> None:
    assert graph_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert (graph_sizes(1), graph_sizes(2000)[-2:]) == ([1], [384, 512])
    graphs = arguments(device="cuda", max_num_seqs=3)["compilation_config"]
    assert graphs == {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 3]}
    own = {"cudagraph_mode": "NONE"}
    assert arguments(device="cuda", engine_args={"compilation_config": own})["compilation_config"] == own


def test_processes_of_an_engine_use_nccl_since_each_sees_one_gpu() -> None:
    shared = arguments(device="cuda", tensor_parallel_size=2)
    assert (shared["tensor_parallel_size"], shared["disable_custom_all_reduce"]) == (2, True)
    assert engine_environment("cuda")["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    assert shared["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}
    assert "pass_config" not in arguments(device="cuda")["compilation_config"]
    assert engine_environment("cuda")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "vLLM's processes outlive their parent"


def test_the_users_engine_arguments_replace_defaults() -> None:
    assert arguments(engine_args={"block_size": 32, "max_num_seqs": 3})["max_num_seqs"] == 3


@pytest.mark.parametrize("name", ["load_format", "dtype", "weight_transfer_config"])
def test_arguments_that_the_trainer_depends_on_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"expected no {name}"):
        arguments(engine_args={name: "auto"})


def test_an_argument_that_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(BadInput, match="found blok_size; remove it"):
        arguments(engine_args={"blok_size": 32})
