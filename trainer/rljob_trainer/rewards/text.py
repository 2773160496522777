"""Rewards for the text of a response: exact match and multiple choice, regular expression, format, length,
repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rljob_api.built_in_rewards import ExactMatchArgs, FormatArgs, LengthArgs, RegexArgs, RepetitionArgs
from rljob_trainer.rewards import references
from rljob_trainer.rewards.overlong import overlong_penalty


def exact_match(answer: str, record: dict[str, Any], args: ExactMatchArgs) -> float | None:
    """1 if the answer, or its last choice, is one of the reference answers; None without a reference answer."""
    accepted = references(record, args.answer_field)
    if not accepted:
        return None
    flags = re.IGNORECASE if args.ignore_case else 0
    if args.choices:
        longest_first = sorted(args.choices, key=len, reverse=True)
        found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", answer, flags)
        answer = found[-1] if found else ""
    texts = [text.strip().casefold() if args.ignore_case else text.strip() for text in (answer, *accepted)]
    return float(texts[0] in texts[1:])


def regex(completion: str, args: RegexArgs) -> float:
    """1 if the pattern matches."""
    search = re.fullmatch if args.whole_response else re.search
    return float(search(args.pattern, completion, re.DOTALL) is not None)


def format(completion: str, args: FormatArgs) -> float:
    """1 if the response consists of the tags in their order, each once."""
    pattern = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in args.tags)
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def length(completion_ids: Sequence[int], args: LengthArgs) -> float:
    """The penalty of `overlong_penalty`, between 0 and -1."""
    return float(overlong_penalty([len(completion_ids)], args.max_tokens, args.buffer_tokens)[0])


def repetition(completion_ids: Sequence[int], args: RepetitionArgs) -> float:
    """Minus the share of n-grams that occur earlier in the response. Source: arXiv 2502.03373, appendix C.2."""
    starts = range(len(completion_ids) - args.ngram_size + 1)
    ngrams = {tuple(completion_ids[start : start + args.ngram_size]) for start in starts}
    return len(ngrams) / len(starts) - 1 if starts else 0.0
