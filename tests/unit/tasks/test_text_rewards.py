"""Built-in rewards that read the text of a response, with values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.built_in_rewards import BUILT_IN_REWARDS
from rljob_client.errors import BadInput
from rljob_trainer.rewards import built_in_function
from rljob_trainer.rewards.overlong import overlong_penalty


def reward(name: str, arguments: dict[str, Any], **values: Any) -> float | None:
    args = BUILT_IN_REWARDS[name].args.model_validate(arguments, by_alias=True, by_name=False)
    result: float | None = built_in_function(name)(args=args, **values)
    return result


def test_every_row_has_a_function() -> None:
    assert all(callable(built_in_function(name)) for name, row in BUILT_IN_REWARDS.items() if row.module)


@pytest.mark.parametrize(
    ("arguments", "answer", "record", "value"),
    [
        ({}, " Paris ", {"answer": "Paris"}, 1),
        ({}, "paris", {"answer": "Paris"}, 0),
        ({"ignoreCase": True}, "paris", {"answer": "Paris"}, 1),
        ({}, "7", {"answer": 7}, 1),
        ({}, "seven", {"answer": ["7", "seven"]}, 1),
        ({"answerField": "solution"}, "7", {"answer": "8", "solution": "7"}, 1),
        ({"answerField": "solution"}, "7", {"answer": "7"}, None),
        ({"choices": ["A", "B", "C"]}, "Not A, but (B).", {"answer": "B"}, 1),
        ({"choices": ["A", "B", "C"]}, "BAD", {"answer": "B"}, 0),
        ({"choices": ["A", "B"], "ignoreCase": True}, "it is b", {"answer": "B"}, 1),
        ({"choices": ["1", "10"]}, "10", {"answer": "10"}, 1),
    ],
)
def test_exact_match(arguments: dict[str, Any], answer: str, record: dict[str, Any], value: float | None) -> None:
    assert reward("exact_match", arguments, answer=answer, record=record) == value


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"so \boxed{\frac{1}{3}}", "0.5", 0),
        ("the answer is 1,000", "1000", 1),
        (r"$\{1, 2\}$", r"\{2, 1\}", 1),
        ("x", r"\frac{1}{2}", 0),
        ("", "4", 0),
        ("4", ["3", "4"], 1),
        ("4", None, None),
        ("4", "", None),
    ],
)
def test_math_verify(answer: str, expected: Any, value: float | None) -> None:
    assert reward("math_verify", {}, answer=answer, record={"answer": expected}) == value


@pytest.mark.parametrize(
    ("name", "arguments", "completion", "value"),
    [
        ("regex", {"pattern": r"\d+$"}, "it is 7", 1),
        ("regex", {"pattern": r"\d+", "wholeResponse": True}, "it is 7", 0),
        ("regex", {"pattern": "a.b"}, "a\nb", 1),
        ("format", {}, "<think>\nwhy\n</think>\n<answer>7</answer>\n", 1),
        ("format", {}, "<think>a</think> so <answer>7</answer>", 0),
        ("format", {}, "<answer>7</answer><think>a</think>", 0),
        ("format", {}, "<think>a<think>b</think><answer>7</answer>", 0),
        ("format", {}, "<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("format", {"tags": ["answer"]}, "<answer><b>7</b></answer>", 1),
        ("format", {}, "", 0),
    ],
)
def test_patterns_and_formats(name: str, arguments: dict[str, Any], completion: str, value: float) -> None:
    assert reward(name, arguments, completion=completion) == value


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (101, -1)])
def test_length_falls_over_the_buffer(tokens: int, value: float) -> None:
    arguments = {"maxTokens": 100, "bufferTokens": 20}
    assert reward("length", arguments, completion_ids=[1] * tokens) == pytest.approx(value)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_overlong_penalty_grows_linearly_in_the_buffer(factor: float) -> None:
    """DAPO's numbers: 16,384 expected tokens, and a buffer of 4,096."""
    found = overlong_penalty([0, 1, 16384, 16385, 18432, 20480], 20480, 4096, factor)
    np.testing.assert_allclose(found, factor * np.array([0, 0, 0, -1 / 4096, -0.5, -1], np.float32))
    assert found.dtype == np.float32


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0.01, 100))
def test_the_overlong_penalty_is_never_positive_nor_below_the_factor(
    max_tokens: int, buffer: int, factor: float
) -> None:
    found = overlong_penalty(range(max_tokens + 1), max_tokens, min(buffer, max_tokens), factor)
    assert (np.diff(found) <= 0).all()
    np.testing.assert_allclose([found[0], found[-1]], [0, -factor], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "tokens", "value"),
    [
        ({}, [1, 2, 3, 4], 0),
        ({}, [1, 2, 3, 1, 2, 3], -1 / 4),  # 123 231 312 123
        ({"ngramSize": 2}, [5, 5, 5, 5, 5], -3 / 4),
        ({"ngramSize": 2}, [5], 0),
        ({}, [], 0),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(arguments: dict[str, Any], tokens: list[int], value: float) -> None:
    assert reward("repetition", arguments, completion_ids=tokens) == pytest.approx(value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "rljob_trainer.rewards.mathematics", raising=False)
    with pytest.raises(BadInput, match=r"needs the package math-verify.*rljob-trainer\[data\]"):
        built_in_function("math_verify")
    monkeypatch.delitem(sys.modules, "rljob_trainer.rewards.mathematics", raising=False)
