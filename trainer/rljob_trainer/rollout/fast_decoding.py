"""Decoding steps that cost the host little: sequences between their first and their last token skip vLLM's code.

vLLM's scheduler treats each sequence of each step as if anything could happen to it, builds objects for its token and
slices arrays for its log-probability. In a rollout, nearly all of them generate one more token in a block that exists.
The fast path advances those in two short loops, and gives everything else to vLLM: steps with prompts, preempted
sequences, and first and last tokens. Tokens, log-probabilities, blocks and the prefix cache stay the same; of
`FlatLogprobs`, only `logprobs` is filled.

It replaces two methods of one engine's scheduler, as they are in vLLM 0.26 and 0.32 (`v1/core/sched/scheduler.py`,
`v1/core/sched/async_scheduler.py`). Tests compare both paths in the installed version for CPUs (0.32).

On GPUs, the log-probabilities themselves take vLLM's kernel with larger blocks (`v1/worker/gpu/sample/logprob.py`), and
the ranks of sampled tokens are not computed, because nobody reads them.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

VARIABLE = "RLJOB_FAST_DECODING"
"""0: vLLM's own code for all tokens, to compare."""

_KNOWN_VERSIONS = ("0.26.", "0.32.")

_MUST_BE_OFF = (
    *("connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "defer_block_free"),
    *("num_spec_tokens", "num_lookahead_tokens", "is_encoder_decoder", "max_num_encoder_input_tokens", "use_pp"),
    *("needs_kv_cache_zeroing", "has_mamba_layers", "log_stats", "enable_kv_cache_events"),
)
"""Attributes of the scheduler. With any of them, a step of single tokens does more than the fast path."""

log = logging.getLogger(__name__)


def install_fast_decoding(llm: Any) -> bool:
    """Use the fast path in `llm`, a `vllm.LLM` whose engine is in this process, if it knows its version and settings.

    All its requests must then have `logprobs=0`, `flat_logprobs=True`, `detokenize=False` and no stop strings, and
    return their final output only. Returns True if the fast path is used.
    """
    if os.environ.get(VARIABLE) == "0":
        return False
    if reason := _unsupported(llm):
        log.warning("decoding steps take vLLM's own path: %s", reason)
        return False
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # Otherwise, a sequence also gives blocks back, for example those outside of its sliding window.
    if [type(manager).__name__ for manager in managers] == ["FullAttentionManager"]:
        scheduler.schedule = _schedule(scheduler)
    scheduler.update_from_output = _update_from_output(scheduler, llm.llm_engine.output_processor.request_states)
    if scheduler.use_v2_model_runner:
        speed_up_kernels()
    return True


def _unsupported(llm: Any) -> str | None:
    """The reason why the fast path cannot be used; None if it can."""
    import vllm

    if not vllm.__version__.startswith(_KNOWN_VERSIONS):
        return f"vLLM {vllm.__version__} is not among the known versions"
    if not hasattr(llm.llm_engine.engine_core, "engine_core"):
        return "the engine runs in another process"
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if found := [name for name in _MUST_BE_OFF if getattr(scheduler, name, None)]:
        return f"the scheduler has {', '.join(found)}"
    if scheduler.dcp_world_size * scheduler.num_sampled_tokens_per_step != 1:
        return "a sequence does not have one token in each step on each GPU"
    return None


def _schedule(scheduler: Any) -> Callable[..., Any]:
    """In place of `Scheduler.schedule`."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    original = scheduler.schedule
    manager = scheduler.kv_cache_manager
    block_size = manager.coordinator.single_type_managers[0].block_size
    runs_ahead = _runs_ahead(scheduler)

    def schedule(throttle_prefills: bool = False) -> Any:
        running = scheduler.running
        if (
            len(scheduler.requests) != len(running)  # some wait
            or scheduler.pause_state
            or scheduler.reset_preempted_req_ids
            or len(running) > scheduler.max_num_scheduled_tokens
        ):
            return original(throttle_prefills)
        due: list[Any] = []
        positions: list[int] = []
        at_boundary: list[int] = []
        for request in running:
            position, ahead = request.num_computed_tokens, request.num_output_placeholders
            last = request.num_prompt_tokens + request.max_tokens
            if (ahead and position + 2 - ahead >= last) or position + 1 >= scheduler.max_model_len:
                continue  # its last token is being generated
            known = len(request._all_token_ids)
            if known + ahead - position != 1:
                return original(throttle_prefills)
            if position % block_size == 0 or known % block_size == 0:
                at_boundary.append(len(due))
            due.append(request)
            positions.append(position)
        ids = [request.request_id for request in due]
        if not ids or manager.block_pool.get_num_free_blocks() < len(at_boundary):
            return original(throttle_prefills)
        if not scheduler.use_v2_model_runner:
            if not scheduler.prev_step_scheduled_req_ids.issuperset(ids):
                return original(throttle_prefills)
            scheduler.prev_step_scheduled_req_ids = set(ids)

        scheduler.current_step += 1
        manager.new_step_starts()
        blocks: list[Any] = [None] * len(ids)
        for index in at_boundary:
            # Takes a new block, or enters one in the prefix cache that is full after this step.
            blocks[index] = manager.allocate_slots(due[index], 1).get_block_ids(allow_none=True)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=positions,
            num_output_tokens=[
                position + 1 - request.num_prompt_tokens for position, request in zip(positions, due, strict=True)
            ],
        )
        output.num_scheduled_tokens = dict.fromkeys(ids, 1)
        output.total_num_scheduled_tokens = len(ids)
        output.preempted_req_ids = set()
        output.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        output.num_common_prefix_blocks = [0]  # read by vLLM 0.26's runner V1 only, for its cascade attention
        for request in due:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += runs_ahead
        return output

    return schedule


def _update_from_output(scheduler: Any, states: Mapping[str, Any]) -> Callable[..., Any]:
    """In place of `Scheduler.update_from_output`: it returns nothing for tokens between the first and the last.

    Their requests return their final output only. `states`: those of the output processor by id.
    """
    original = scheduler.update_from_output
    runs_ahead = _runs_ahead(scheduler)

    def update_from_output(scheduler_output: Any, model_output: Any) -> Any:
        lists = model_output.logprobs
        if lists is None or lists.cu_num_generated_tokens is not None:
            return original(scheduler_output, model_output)
        # The sampled token is in the first column: vllm/v1/sample/sampler.py, vllm/v1/worker/gpu/sample/logprob.py.
        logprobs, sampled = lists.logprobs[:, 0].tolist(), model_output.sampled_token_ids
        others = {}
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = scheduler.requests.get(request_id)
            index = model_output.req_id_to_index[request_id]
            if (
                request is None
                or request.prefill_stats is not None
                or request.num_preemptions
                or len(sampled[index]) != 1
                or _stops(request, sampled[index][0], scheduler.max_model_len)
            ):
                others[request_id] = scheduled
                continue
            token = sampled[index][0]
            known, state = request._all_token_ids, states[request_id]
            request._output_token_ids.append(token)
            known.append(token)
            state.detokenizer.token_ids.append(token)
            state.logprobs_processor.logprobs.logprobs.append(logprobs[index])
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= runs_ahead
            if len(known) % scheduler.hash_block_size == 0:
                request.update_block_hashes()
        rest = copy.copy(scheduler_output)
        rest.num_scheduled_tokens = others
        return original(rest, model_output)

    return update_from_output


def _stops(request: Any, token: int, max_model_len: int) -> bool:
    """True if `token` may be the last of `request`: vLLM decides (`v1/core/sched/utils.py`, `check_stop`)."""
    sampling = request.sampling_params
    return (
        token == sampling.eos_token_id
        or token in sampling.stop_token_ids
        or len(request._output_token_ids) + 1 >= request.max_tokens
        or len(request._all_token_ids) + 1 >= max_model_len
        or sampling.repetition_detection is not None
    )


def speed_up_kernels() -> None:
    """Speed up the log-probabilities of this process, of 128 tokens among 151,936 from 294 to 44 µs on an H200.

    They differ from those of vLLM's own blocks by at most 2e-6, and as much from the exact ones.
    """
    from vllm.v1.worker.gpu.sample import logprob

    if not isinstance(logprob._topk_log_softmax_kernel, _Kernel):
        logprob._topk_log_softmax_kernel = _Kernel(logprob._topk_log_softmax_kernel, BLOCK_SIZE=16384, num_warps=32)
        logprob._ranks_kernel = _Kernel(None)


class _Kernel:
    """Takes the place of a Triton kernel, and launches it with other settings; None: does not launch it."""

    def __init__(self, kernel: Any, **settings: int) -> None:
        self.kernel = kernel
        self._settings = settings

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if self.kernel is None:
            return lambda *_arguments, **_settings: None
        launch = self.kernel[grid]
        return lambda *arguments, **settings: launch(*arguments, **settings | self._settings)


def _runs_ahead(scheduler: Any) -> int:
    """Tokens that a step adds to a sequence before they are known: 1 if vLLM schedules asynchronously, otherwise 0."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return int(isinstance(scheduler, AsyncScheduler))
