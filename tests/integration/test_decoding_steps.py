"""The fast path of decoding steps against vLLM's own scheduler, with a model that is a hash of request and position."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.fast_decoding import install_fast_decoding

BLOCK, LONGEST, END, OTHER_END = 4, 40, 63, 62


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("random://qwen3", tmp_path_factory.mktemp("model"))


class DrivenEngine:
    """vLLM's scheduler and output processor, as `vllm.v1.engine.core.EngineCore` calls them."""

    def __init__(
        self, model_dir: Path, *, fast: bool, runs_ahead: bool, blocks: int, caching: bool, window: int = 0
    ) -> None:
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(model=str(model_dir), dtype="float32", max_model_len=LONGEST),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
            scheduler_config=SchedulerConfig(
                max_model_len=LONGEST,
                is_encoder_decoder=False,
                max_num_seqs=6,
                max_num_batched_tokens=LONGEST,
            ),
        )
        config.cache_config.num_gpu_blocks = blocks
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        self.scheduler: Any = (AsyncScheduler if runs_ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self.scheduler.use_v2_model_runner = runs_ahead
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None
        self.processor = OutputProcessor(None, log_stats=False)
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.depth = 2 if runs_ahead else 1
        self.prompts: dict[str, int] = {}
        self.steps: list[Any] = []
        self.finished: dict[str, Any] = {}
        self.calls_of_vllm = 0
        schedule = self.scheduler.schedule

        def counted(*arguments: Any) -> Any:
            self.calls_of_vllm += 1
            return schedule(*arguments)

        self.scheduler.schedule = counted
        if fast:
            core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
            llm = SimpleNamespace(engine_core=core, output_processor=self.processor)
            assert install_fast_decoding(SimpleNamespace(llm_engine=llm))

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=tokens,
            stop_token_ids=[OTHER_END],
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        sampling.update_from_generation_config({}, END)
        request = EngineCoreRequest(name, prompt, None, sampling, None, 0.0, None, None, None, external_req_id=name)
        self.processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self.hasher))
        self.prompts[name] = len(prompt)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        for each in self.processor.abort_requests([name], internal=True):
            self.scheduler.finish_requests([each], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.steps.append(scheduled)
            self.in_flight.append((scheduled, self.run_model(scheduled)))
        if len(self.in_flight) == self.depth or not self.scheduler.has_requests():
            outputs = self.scheduler.update_from_output(*self.in_flight.popleft()).get(0)
            for each in self.processor.process_outputs(outputs.outputs if outputs else []).request_outputs:
                self.finished[each.request_id] = each.outputs[0]

    def run_model(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        cached = scheduled.scheduled_cached_reqs
        positions = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        positions |= {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        names, sampled, logprobs = list(scheduled.num_scheduled_tokens), [], []
        for name in names:
            position = positions[name] + scheduled.num_scheduled_tokens[name]
            known = max(self.prompts[name], self.scheduler.requests[name].num_tokens)
            token = random.Random(f"{name} {position}")
            sampled.append([token.randrange(64)] if position >= known else [])
            logprobs.append([-token.random()])
        lists = LogprobsLists(
            np.array([tokens or [0] for tokens in sampled]), np.array(logprobs, np.float32), np.ones(len(names), int)
        )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=lists if names else None,
            prompt_logprobs_dict={},
        )

    def state(self) -> dict[str, Any]:
        """Everything that later steps depend on."""
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        pool = manager.block_pool
        return {
            "running": [request.request_id for request in self.scheduler.running],
            "requests": {
                name: (
                    *(request.status, request.num_computed_tokens, request.num_in_flight_tokens),
                    *(request.num_output_placeholders, list(request.all_token_ids), list(request.block_hashes)),
                )
                for name, request in self.scheduler.requests.items()
            },
            "blocks": {name: [block.block_id for block in blocks] for name, blocks in manager.req_to_blocks.items()},
            "cached": [(block.block_id, block.block_hash) for block in pool.blocks if block.block_hash],
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        }


@pytest.mark.parametrize("window", [0, 6], ids=["full attention", "sliding window"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("blocks", [200, 24], ids=["room", "preemptions"])
@pytest.mark.parametrize("runs_ahead", [True, False], ids=["as on GPUs", "as on CPUs"])
def test_steps_blocks_and_responses_are_those_of_vllm(
    model_dir: Path, runs_ahead: bool, blocks: int, caching: bool, window: int
) -> None:
    settings: dict[str, Any] = {"runs_ahead": runs_ahead, "blocks": blocks, "caching": caching, "window": window}
    vllm, fast = engines = [DrivenEngine(model_dir, fast=fast, **settings) for fast in (False, True)]
    chance = random.Random(3)
    events: dict[int, Callable[[DrivenEngine], None]] = {}
    for number in range(40):
        prompt = [4 + (number % 3 + place) % 40 for place in range(1 + chance.randrange(12))]
        name, tokens = f"r{number}", 1 + chance.randrange(LONGEST)
        events[6 * number] = methodcaller("add", name, prompt, tokens)
        if number % 9 == 5:
            events[6 * number + 4] = methodcaller("abort", name)
    for step in range(600):
        for engine in engines:
            if step in events:
                events[step](engine)
            if engine.scheduler.has_requests() or engine.in_flight:
                engine.step()
        assert vllm.state() == fast.state(), f"after step {step}"
    for step in vllm.steps + fast.steps:
        step.num_common_prefix_blocks = []  # unused
    assert vllm.steps == fast.steps
    assert [list(each.token_ids) for each in vllm.finished.values()] == [
        list(each.token_ids) for each in fast.finished.values()
    ]
    for name, expected in vllm.finished.items():
        assert expected.finish_reason == fast.finished[name].finish_reason
        assert list(expected.logprobs.logprobs) == list(fast.finished[name].logprobs.logprobs)
    assert {each.finish_reason for each in vllm.finished.values()} == {"length", "stop"}
    assert any(each.preempted_req_ids for each in vllm.steps) == (blocks == 24 and not window)
    assert window or fast.calls_of_vllm < len(fast.steps) / 2 < vllm.calls_of_vllm


def test_kernels_keep_their_arguments_and_get_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample import logprob

    from rljob_trainer.rollout.fast_decoding import speed_up_kernels

    launches: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **settings: launches.append((grid, len(arguments), settings))

    for name in ("_topk_log_softmax_kernel", "_ranks_kernel"):
        monkeypatch.setattr(logprob, name, Kernel())
    monkeypatch.setattr(logprob, "triton", SimpleNamespace(next_power_of_2=lambda count: count))
    work = (torch.zeros(3, 8), 0, torch.tensor([1, 2, 3]))
    logprob.compute_topk_scores(*work)
    of_vllm = launches.copy()
    for _ in range(2):  # for a second engine
        speed_up_kernels()
    logprob.compute_topk_scores(*work)
    (grid, count, settings), _ranks = of_vllm
    assert launches[2:] == [(grid, count, settings | {"BLOCK_SIZE": 16384, "num_warps": 32})]
