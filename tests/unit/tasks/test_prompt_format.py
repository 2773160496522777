from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rljob_client.errors import BadInput
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


def with_post_processor(tokenizer: Any, single: str) -> Any:
    """A copy that adds special tokens to each text, as `single` describes."""
    changed = copy.deepcopy(tokenizer)
    special = [(token, changed.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    changed.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return changed


@pytest.mark.parametrize(
    ("single", "text", "expected"),
    [
        ("$A <eos>", "2+2", "2+2"),
        ("<bos> $A <eos>", "2+2", "<bos>2+2"),
        ("<bos> $A", "<bos>2+2", "<bos>2+2"),
        ("<bos> $A <eos>", "2+2<eos>", "<bos>2+2<eos>"),
        ("$A", "2+2", "2+2"),
        ("<bos> $A <eos>", "", ""),
    ],
)
def test_a_prompt_is_left_open_and_begins_once(tokenizer: Any, single: str, text: str, expected: str) -> None:
    _, token_ids = PromptFormat(with_post_processor(tokenizer, single)).tokens(text)
    assert tokenizer.decode(token_ids) == expected


def test_truncation_and_padding_of_the_tokenizer_are_not_applied(tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.backend_tokenizer.enable_truncation(3)
    changed.backend_tokenizer.enable_padding(length=10)
    saved = PreTrainedTokenizerFast(tokenizer_object=changed.backend_tokenizer)
    assert PromptFormat(saved).tokens("123456")[1] == tokenizer("123456").input_ids


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
USER_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template", [REFUSES_SYSTEM + USER_ONLY, USER_ONLY, "{{ messages[1].content.x.y }}" + USER_ONLY]
)
def test_a_template_without_a_system_message_names_the_field(chat_tokenizer: Any, template: str) -> None:
    chat_tokenizer.chat_template = template
    if "messages[1]" in template:
        with pytest.raises(BadInput, match=r"expected a prompt from the chat template in .*; correct the template"):
            PromptFormat(chat_tokenizer, system_prompt="be brief")
        return
    with pytest.raises(BadInput, match=r"task\.systemPrompt: .*put the text into task\.promptTemplate") as raised:
        PromptFormat(chat_tokenizer, system_prompt="be brief")
    assert raised.value.field == ("spec", "task", "systemPrompt")
    assert PromptFormat(chat_tokenizer, template="Be brief. {question}").tokens("2?")[0] == "Be brief. 2?"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if x %}", "TemplateSyntaxError"),
        ("{{ x.y }}", "UndefinedError"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{{ raise_exception('never') }}", "TemplateError: never"),
        ("Answer.", "found it left out"),
        ({"tools": "x"}, "ValueError"),
    ],
)
def test_a_template_that_makes_no_prompt_is_named(chat_tokenizer: Any, template: Any, found: str) -> None:
    chat_tokenizer.chat_template = template
    with pytest.raises(BadInput, match=rf"the chat template in .*{found}.*task\.chatTemplate: Never"):
        PromptFormat(chat_tokenizer)
    assert PromptFormat(chat_tokenizer, chat_template="Never").tokens("2?")[0] == "2?"


def test_a_template_that_refuses_one_question_is_named(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = (
        "{% if messages[0].content == 'x' %}{{ raise_exception('not x') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(BadInput, match="TemplateError: not x"):
        PromptFormat(chat_tokenizer).tokens("x")


@pytest.mark.parametrize(
    ("before", "after", "warning"),
    [
        ("{{ strftime_now('%d') }}", "", "writes the date"),
        ("", "{{ eos_token }}", "ends prompts with the end-of-sequence token '<eos>'"),
        ("", "{{ eos_token }}\n", "ends prompts with the end-of-sequence token '<eos>'"),
        ("", "{{ eos_token }}{% if add_generation_prompt %}A:{% endif %}", None),
        ("{{ eos_token }}", "", None),
    ],
)
def test_a_template_whose_prompts_may_be_a_mistake_is_recognized(
    chat_tokenizer: Any, before: str, after: str, warning: str | None
) -> None:
    chat_tokenizer.chat_template = before + USER_ONLY + after
    found = PromptFormat(chat_tokenizer).warnings()
    assert len(found) == (warning is not None)
    assert warning is None or warning in found[0]
    assert not PromptFormat(chat_tokenizer, chat_template="Never").warnings()


def test_a_system_prompt_that_is_left_out_is_refused(chat_tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"task\.systemPrompt: expected task\.chatTemplate: Auto or Always, found Never"):
        PromptFormat(chat_tokenizer, system_prompt="be brief", chat_template="Never")


def test_half_of_a_character_is_named(tokenizer: Any, chat_tokenizer: Any) -> None:
    for prompts in (PromptFormat(tokenizer), PromptFormat(chat_tokenizer)):
        with pytest.raises(BadInput, match=r"found half of a character in '.*ab \\ud83d c"):
            prompts.tokens("ab \ud83d c")


def test_a_token_that_the_model_lacks_is_named_with_both_sizes(tokenizer: Any) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<tool>"], special_tokens=True)
    text, rows = "2+2 <tool>", len(tokenizer)
    with pytest.raises(
        BadInput, match=rf"below {rows}, .* found {rows} \('<tool>'\) .* {rows + 1} tokens in '2\+2 <tool>'"
    ):
        PromptFormat(larger, vocabulary=rows).tokens(text)
    assert rows in PromptFormat(larger, vocabulary=rows + 1).tokens(text)[1]


def test_an_end_token_that_the_model_lacks_is_refused(tokenizer: Any) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_special_tokens({"eos_token": "<stop>"})
    with pytest.raises(BadInput, match=rf"end-of-sequence token .* below {len(tokenizer)}, .*'<stop>'.*no response"):
        PromptFormat(larger, vocabulary=len(tokenizer))
    PromptFormat(larger, vocabulary=len(larger))
