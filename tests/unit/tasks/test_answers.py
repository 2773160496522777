from __future__ import annotations

import pytest

from rljob_api.task import AnswerSpec
from rljob_trainer.tasks.rewards import extract_answer

RESPONSE = "  First <answer>1</answer>, no: <answer>\n 2\n</answer> \n"


@pytest.mark.parametrize(("match", "answer"), [("First", "1"), ("Last", "2")])
def test_the_chosen_match_is_the_answer(match: str, answer: str) -> None:
    spec = AnswerSpec.model_validate({"pattern": "<answer>(.*?)</answer>", "match": match})
    assert extract_answer(RESPONSE, spec) == answer


def test_without_a_match_the_answer_is_empty() -> None:
    assert extract_answer("I do not know", AnswerSpec(pattern=r"(\d+)")) == ""


def test_without_a_pattern_the_answer_is_the_stripped_response() -> None:
    assert extract_answer(" 7 \n", None) == "7"
