"""Equality of answers as mathematics, by math-verify."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rljob_api.built_in_rewards import MathVerifyArgs
from rljob_client.errors import BadInput
from rljob_trainer.rewards import references

try:
    from math_verify import parse, verify
except ImportError as error:
    raise BadInput(
        "the reward function math_verify needs the package math-verify, which is not installed; run pip install "
        "'rljob-trainer[data]', or build the image with it"
    ) from error


def math_verify(answer: str, record: dict[str, Any], args: MathVerifyArgs) -> float | None:
    """1 if the answer equals a reference answer; None if no reference answer can be read."""
    expected = [parsed for text in references(record, args.answer_field) if (parsed := _reference(text))]
    if not expected:
        return None
    found = parse(answer)
    return float(any(verify(list(parsed), found) for parsed in expected))


@lru_cache(maxsize=4096)
def _reference(text: str) -> tuple[Any, ...]:
    """The parsed reference answer, which may be LaTeX without the $ around it."""
    bare = "$" not in text and "boxed" not in text
    return tuple((parse(f"${text}$") if bare else ()) or parse(text))
