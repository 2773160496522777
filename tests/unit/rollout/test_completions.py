from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rljob_client.errors import RunError
from rljob_trainer.rollout.engine import completions_of


def output(index: int, token_ids: list[int], reason: str, logprobs: list[float] | None = None) -> Any:
    """The fields of vLLM's CompletionOutput that are read."""
    return SimpleNamespace(
        index=index,
        token_ids=tuple(token_ids),
        logprobs=SimpleNamespace(logprobs=[-0.5] * len(token_ids) if logprobs is None else logprobs),
        finish_reason=reason,
    )


class Tokenizer:
    """Decodes token 2, the end of a sequence, as an empty text, and other tokens as their number."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(str(token) for token in ids if token != 2) for ids in sequences]


TOKENIZER = Tokenizer()


def test_completions_keep_the_order_of_prompts_and_samples() -> None:
    requests = [
        SimpleNamespace(outputs=[output(1, [8], "length"), output(0, [7, 2], "stop")]),
        SimpleNamespace(outputs=[output(0, [9], "stop")]),
    ]
    completions = completions_of(requests, TOKENIZER)
    assert [c.token_ids for c in completions] == [[7, 2], [8], [9]]
    assert [c.text for c in completions] == ["7", "8", "9"]
    assert [c.finished for c in completions] == [True, False, True]
    assert [c.logprobs for c in completions] == [[-0.5, -0.5], [-0.5], [-0.5]]


def test_an_empty_response_is_a_completion() -> None:
    empty = output(0, [], "stop")
    empty.logprobs = None
    [completion] = completions_of([SimpleNamespace(outputs=[empty])], TOKENIZER)
    assert (completion.token_ids, completion.logprobs, completion.finished) == ([], [], True)


def test_an_aborted_response_is_not_a_completion() -> None:
    with pytest.raises(RunError, match="'abort'"):
        completions_of([SimpleNamespace(outputs=[output(0, [7], "abort")])], TOKENIZER)


def test_a_missing_log_probability_is_noticed() -> None:
    with pytest.raises(RunError, match="1 log-probabilities for 2 tokens"):
        completions_of([SimpleNamespace(outputs=[output(0, [7, 8], "stop", [-0.5])])], TOKENIZER)
