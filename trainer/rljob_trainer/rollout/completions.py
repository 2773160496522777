"""From vLLM's outputs to completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rljob_trainer.errors import TrainerError
from rljob_trainer.rollout_batch import Completion


def completions_of(request_outputs: Iterable[Any], tokenizer: Any) -> list[Completion]:
    """Completions of `vllm.RequestOutput`s made with `logprobs=0` and `flat_logprobs`, group after group.

    `tokenizer`: a Hugging Face tokenizer, which makes the texts of all at once; special tokens are left out of them.
    """
    outputs = [o for request in request_outputs for o in sorted(request.outputs, key=lambda output: output.index)]
    texts = tokenizer.batch_decode([list(output.token_ids) for output in outputs], skip_special_tokens=True)
    return [_completion(output, text) for output, text in zip(outputs, texts, strict=True)]


def _completion(output: Any, text: str) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise TrainerError(f"the engine ended a response with {output.finish_reason!r}; expected 'stop' or 'length'")
    token_ids = list(output.token_ids)
    # One log-probability a position: that of the sampled token.
    logprobs = list(output.logprobs.logprobs) if token_ids else []
    if len(logprobs) != len(token_ids):
        raise TrainerError(f"the engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    return Completion(token_ids, logprobs, finished=output.finish_reason == "stop", text=text)
