"""A rollout engine without a model: its completions, its sleep, and the version of its weights."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import RunError
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout.engine import completions_of
from rljob_trainer.rollout.start_work import spare_start_work
from rljob_trainer.rollout.synced_weights import SyncedWeights, WeightsNotSynced
from rljob_trainer.rollout.topology_engines import ColocatedEngine


def output(index: int, token_ids: list[int], reason: str, logprobs: list[float] | None = None) -> Any:
    """The fields of vLLM's CompletionOutput that are read."""
    return SimpleNamespace(
        index=index,
        token_ids=tuple(token_ids),
        logprobs=SimpleNamespace(logprobs=[-0.5] * len(token_ids) if logprobs is None else logprobs),
        finish_reason=reason,
    )


class NumberTokenizer:
    """Decodes token 2, the end of a sequence, as an empty text, and other tokens as their number."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(str(token) for token in ids if token != 2) for ids in sequences]


TOKENIZER = NumberTokenizer()


@pytest.mark.parametrize(("constants", "calls"), [({"_LL_BF16_WARMUP_MODEL_SHAPES": ((6144, 264),)}, 0), ({}, 1)])
def test_the_start_of_an_engine_compiles_what_the_job_needs(
    constants: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26, which has the shapes of other models as a constant, and later versions."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    compiled = []
    kernel_warmup = SimpleNamespace(_warmup_ll_bf16_router_gemm=lambda: compiled.append(1), **constants)
    vllm: Any = SimpleNamespace(SamplingParams=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(
        sys.modules, "vllm.model_executor.warmup", cast(ModuleType, SimpleNamespace(kernel_warmup=kernel_warmup))
    )
    spare_start_work("the job's parameters")
    kernel_warmup._warmup_ll_bf16_router_gemm()
    assert len(compiled) == calls
    assert vllm.SamplingParams.for_sampler_warmup() == "the job's parameters"


@pytest.mark.parametrize("own", [None, "/own"])
def test_engines_share_a_directory_of_kernels(own: str | None, tmp_path: Path) -> None:
    """Inductor moves Triton's directory, unless a variable names one."""
    code = """if True:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
        from triton import knobs
        from rljob_trainer.rollout.start_work import keep_kernels_for_the_next_engine
        of_triton = knobs.cache.dir
        keep_kernels_for_the_next_engine()
        print(triton_cache_dir(0), of_triton)
    """
    variables = {**os.environ, "TRITON_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": "/of/the/settings"}
    variables.pop("TRITON_CACHE_DIR", None)
    variables |= {"TRITON_CACHE_DIR": own} if own else {}
    shown = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [own or f"{tmp_path}/.triton/cache"] * 2


def test_completions_keep_the_order_of_prompts_and_samples() -> None:
    empty = output(0, [], "stop")
    empty.logprobs = None
    requests = [
        SimpleNamespace(outputs=[output(1, [8], "length"), output(0, [7, 2], "stop")]),
        SimpleNamespace(outputs=[empty]),
    ]
    completions = completions_of(requests, TOKENIZER)
    assert [list(c.token_ids) for c in completions] == [[7, 2], [8], []]
    assert [c.text for c in completions] == ["7", "8", ""]
    assert [c.finished for c in completions] == [True, False, True]
    assert [list(c.logprobs) for c in completions] == [[-0.5, -0.5], [-0.5], []]


def test_a_token_and_its_logprob_are_sent_in_eight_bytes_without_a_loss() -> None:
    logprobs = np.random.default_rng(0).normal(-4, 2, 1000).astype(np.float32)
    request = SimpleNamespace(outputs=[output(0, list(range(1000)), "length", logprobs.tolist())])
    [completion] = completions_of([request], TOKENIZER)
    without_text = pickle.dumps(replace(completion, text=""))
    assert len(without_text) < 8 * 1000 + 400
    received = pickle.loads(without_text)
    assert list(received.token_ids) == list(range(1000))
    np.testing.assert_array_equal(np.asarray(received.logprobs, np.float32), logprobs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (output(0, [7], "abort"), "'abort'"),
        (output(0, [7, 8], "stop", [-0.5]), "1 log-probabilities for 2 tokens"),
    ],
)
def test_an_aborted_or_incomplete_response_is_not_a_completion(wrong: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        completions_of([SimpleNamespace(outputs=[wrong])], TOKENIZER)


def engine(model_dir: Path, **settings: Any) -> tuple[ColocatedEngine, list[object]]:
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_bytes": 1 << 20,
    }
    algorithm = AlgorithmSpec(steps=1, max_response_tokens=8)
    made = ColocatedEngine(0, RolloutConfig(model_dir=model_dir, algorithm=algorithm, **(defaults | settings)))
    calls: list[object] = []
    made._llm = SimpleNamespace(sleep=lambda level: calls.append(level), wake_up=lambda tags: calls.append(tags))
    return made, calls


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("random://qwen3", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sleep_level": 0}, []),
        ({"sleep_level": 2, "device": "cpu", "dtype": "float32"}, []),
        ({"sleep_level": 1}, [1, ["weights"], ["kv_cache"]]),
        ({"sleep_level": 2}, [2, ["weights"], ["kv_cache"]]),
    ],
)
def test_an_engine_sleeps_at_its_level_and_wakes_each_part_once(
    model_dir: Path, settings: dict[str, object], expected: list[object]
) -> None:
    made, calls = engine(model_dir, **settings)
    made.sleep()
    made.sleep()
    made.wake_weights()
    made.wake_kv_cache()
    made.wake_kv_cache()
    assert calls == expected


def test_a_rollout_process_imports_neither_policy_nor_optimizer() -> None:
    program = (
        "import rljob_trainer.roles.rollout_actor, rljob_trainer.weight_sync.broadcast, sys;"
        "print([name for name in sys.modules if name.startswith(('rljob_trainer.policy', 'torch.optim'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def synced(version: int = 1) -> SyncedWeights:
    weights = SyncedWeights(["a", "b"])
    weights.begin()
    weights.receive(["a"])
    weights.receive(["b"])
    weights.complete(version)
    return weights


def test_only_weights_of_a_complete_sync_may_be_used() -> None:
    weights = SyncedWeights(["a", "b"])
    with pytest.raises(WeightsNotSynced, match="it has never received weights"):
        weights.require()
    weights = synced(7)
    assert weights.require() == 7
    assert not weights.interrupted
    weights.begin()
    weights.receive(["b", "unknown"])
    assert weights.interrupted
    with pytest.raises(WeightsNotSynced, match="did not complete"):
        weights.require()
    with pytest.raises(WeightsNotSynced, match="1 of 2 weights missing \\(a"):
        weights.complete(8)
    with pytest.raises(WeightsNotSynced):
        weights.require()


def test_weights_that_sleep_dropped_are_refused_until_the_next_sync() -> None:
    weights = synced()
    weights.drop()
    with pytest.raises(WeightsNotSynced, match="dropped when it went to sleep"):
        weights.require()
    assert not weights.interrupted, "nothing is half loaded"
