from __future__ import annotations

from typing import Any

import pytest

from rljob_trainer.errors import BadInput
from rljob_trainer.tasks.task import PromptFormat


def test_a_question_takes_its_place_in_the_template_unchanged(tokenizer: Any) -> None:
    text, token_ids = PromptFormat(tokenizer, template="say {question}!").tokens("{x}\\1")
    assert text == "say {x}\\1!"
    assert len(token_ids) == len(text)


def test_the_chat_template_is_used_if_the_tokenizer_has_one(chat_tokenizer: Any) -> None:
    text, token_ids = PromptFormat(chat_tokenizer, system_prompt="be brief").tokens("2?")
    assert text == "<bos>system: be brief<bos>user: 2?<bos>"
    bos = chat_tokenizer.bos_token_id
    assert token_ids.count(bos) == 3
    assert token_ids[-1] == bos


def test_never_leaves_the_chat_template_out(chat_tokenizer: Any) -> None:
    assert PromptFormat(chat_tokenizer, chat_template="Never").tokens("2?")[0] == "2?"


@pytest.mark.parametrize("settings", [{"chat_template": "Always"}, {"system_prompt": "be brief"}])
def test_a_tokenizer_without_a_required_chat_template_is_refused(tokenizer: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="tokenizer with a chat template, found none"):
        PromptFormat(tokenizer, **settings)
