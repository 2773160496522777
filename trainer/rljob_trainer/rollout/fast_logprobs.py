"""Log-probabilities of sampled tokens at little cost: one array per decoding step, instead of objects for every token.

For each token of each sequence, vLLM slices three arrays, converts the slices, appends to six lists, and then decides
that nothing has to be returned yet. The whole process waits for it. The fast path takes the log-probabilities of all
sequences from the sampler's array at once, appends one number per token, and leaves only sequences that begin or end to
vLLM's own code. The results have the same values; of `FlatLogprobs`, only `logprobs` is filled. On an H200, a decoding
step of 128 sequences of Qwen3-0.6B's shape took 4.4 ms instead of 5.5 (medians of nine rounds in turn, 2026-11-27,
`bench/results/rollout_engine.json`).

It replaces two methods of one engine's objects, as they are in vLLM 0.26 and 0.32: `v1/core/sched/scheduler.py` calls
`LogprobsLists.slice_request` for each sequence, and `v1/engine/output_processor.py` reads the result. Tests compare
both paths in the installed version for CPUs (0.32), and were run with 0.26 for CPUs; its runner for GPUs was read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

VARIABLE = "RLJOB_FAST_LOGPROBS"
"""0: vLLM's own code for all tokens, to compare."""

_KNOWN_VERSIONS = ("0.26.", "0.32.")

log = logging.getLogger(__name__)


def install_fast_logprobs(llm: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """Use the fast path in `llm`, a `vllm.LLM` whose engine is in this process, if its version is known.

    All its requests must then have `logprobs=0`, `flat_logprobs=True`, `detokenize=False` and no stop strings, and
    return their final output only. Returns True if the fast path is used.
    """
    if environment.get(VARIABLE) == "0":
        return False
    if reason := _unsupported(llm):
        log.warning("log-probabilities take vLLM's own path: %s", reason)
        return False
    engine = llm.llm_engine
    scheduler, processor = engine.engine_core.engine_core.scheduler, engine.output_processor
    scheduler.update_from_output = _update_from_output(scheduler.update_from_output)
    processor.process_outputs = _process_outputs(processor.process_outputs, processor.request_states)
    return True


def _unsupported(llm: Any) -> str | None:
    """The reason why the fast path cannot be used; None if it can."""
    import vllm
    from vllm.v1.outputs import LogprobsLists

    if not vllm.__version__.startswith(_KNOWN_VERSIONS):
        return f"vLLM {vllm.__version__} is not among the known versions"
    if LogprobsLists._fields[1] != "logprobs" or LogprobsLists._fields[3] != "cu_num_generated_tokens":
        return "vLLM's arrays of log-probabilities have changed"
    if not hasattr(llm.llm_engine.engine_core, "engine_core"):
        return "the engine runs in another process"
    if llm.llm_engine.output_processor.log_stats:
        return "engine statistics are enabled (rollout.engineArgs, disable_log_stats), which count every token"
    return None


class SampledLogprobs:
    """Takes the place of vLLM's `LogprobsLists` of one decoding step in the scheduler."""

    __slots__ = ("_first", "_values")

    def __init__(self, lists: Any) -> None:
        # The sampled token is in the first column: vllm/v1/sample/sampler.py, vllm/v1/worker/gpu/sample/logprob.py.
        self._values: list[float] = lists.logprobs[:, 0].tolist()
        self._first: list[int] | None = lists.cu_num_generated_tokens

    def slice_request(self, index: int, tokens: int) -> list[float]:
        """The log-probabilities of the `tokens` that the sequence with this index has sampled."""
        first = index if self._first is None else self._first[index]
        return self._values[first : first + tokens]


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `Scheduler.update_from_output`: its outputs have a list of numbers as `new_logprobs`."""

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = SampledLogprobs(model_runner_output.logprobs)
        return original(scheduler_output, model_runner_output)

    return update_from_output


def _process_outputs(original: Callable[..., Any], states: Mapping[str, Any]) -> Callable[..., Any]:
    """In place of `OutputProcessor.process_outputs`, for outputs of `_update_from_output`.

    Requests that return their final output only have nothing to return for a token between their first and their last.
    `states`: the requests of the processor by id, which it updates.
    """

    def process_outputs(outputs: list[Any], *arguments: Any, **keywords: Any) -> Any:
        others = []
        for output in outputs:
            state = states.get(output.request_id)
            logprobs = output.new_logprobs
            if state is not None and type(logprobs) is list:
                state.logprobs_processor.logprobs.logprobs += logprobs
                output.new_logprobs = None
                if output.finish_reason is None and not state.is_prefilling:
                    state.detokenizer.token_ids += output.new_token_ids
                    continue
            others.append(output)
        return original(others, *arguments, **keywords)

    return process_outputs
