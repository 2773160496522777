"""Prompts: their tokens, and the check of a source before the start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks import prompt_check
from rljob_trainer.tasks.item_fields import Conversation
from rljob_trainer.tasks.prompt_check import check_prompts
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.rewards import Reward
from rljob_trainer.tasks.scoring import ScoringHere
from rljob_trainer.tasks.step_rewards import try_out
from rljob_trainer.tasks.task import Item, Task


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


def test_settings_that_contradict_the_tokenizer_are_refused(tokenizer: Any, chat_tokenizer: Any) -> None:
    requiring: list[dict[str, Any]] = [{"chat_template": "Always"}, {"system_prompt": "be brief"}]
    for settings in requiring:
        with pytest.raises(BadInput, match="tokenizer with a chat template, found none"):
            PromptFormat(tokenizer, **settings)
    with pytest.raises(BadInput, match=r"task\.systemPrompt: expected task\.chatTemplate: Auto or Always, found Never"):
        PromptFormat(chat_tokenizer, system_prompt="be brief", chat_template="Never")


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([says("user", "2?")], "<bos>system: be brief<bos>user: say 2?<bos>"),
        ([says("system", "be long"), says("user", "2?")], "<bos>system: be long<bos>user: say 2?<bos>"),
        (
            [says("user", "1?"), says("assistant", "1"), says("user", "2?")],
            "<bos>system: be brief<bos>user: 1?<bos>assistant: 1<bos>user: say 2?<bos>",
        ),
        (
            [says("user", "2?"), says("assistant", "it is ")],
            "<bos>system: be brief<bos>user: say 2?<bos>assistant: it is ",
        ),
        ([says("user", "2?"), says("tool", "2")], "<bos>system: be brief<bos>user: say 2?<bos>tool: 2<bos>"),
    ],
)
def test_a_conversation_goes_through_the_chat_template(
    chat_tokenizer: Any, conversation: Conversation, expected: str
) -> None:
    """A system message of its own stays, the template is for the last question, and an open answer is continued."""
    before = copy.deepcopy(conversation)
    prompts = PromptFormat(chat_tokenizer, template="say {question}", system_prompt="be brief")
    text, token_ids = prompts.tokens(conversation)
    assert text == expected == chat_tokenizer.decode(token_ids)
    assert conversation == before


def test_a_conversation_needs_a_chat_template_that_shows_it(tokenizer: Any, chat_tokenizer: Any) -> None:
    question = [says("system", "be brief"), says("user", "2?")]
    with pytest.raises(
        BadInput, match=r"chat template for the prompt, which is a conversation, found none; use a model"
    ):
        PromptFormat(tokenizer).tokens(question)
    with pytest.raises(BadInput, match=r"which is a conversation, found task\.chatTemplate: Never"):
        PromptFormat(chat_tokenizer, chat_template="Never").tokens(question)
    with pytest.raises(BadInput, match=r"a message of the user for task\.promptTemplate, found none"):
        PromptFormat(chat_tokenizer, template="say {question}").tokens([says("assistant", "a")])
    chat_tokenizer.chat_template = USER_ONLY
    with pytest.raises(BadInput, match=r"found one of the system left out \('be brief'\)"):
        PromptFormat(chat_tokenizer).tokens(question)
    chat_tokenizer.chat_template = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    with pytest.raises(BadInput, match="the final message does not appear in the chat"):
        PromptFormat(chat_tokenizer).tokens([says("user", "2?"), says("assistant", "it is ")])


def test_arguments_reach_the_chat_template(tokenizer: Any, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = USER_ONLY + "{% if thinking is defined and not thinking %} no{% endif %}"
    without, unread = ({name: False} for name in ("thinking", "thinkin"))
    assert PromptFormat(chat_tokenizer).tokens("2?")[0] == "2?"
    prompts = PromptFormat(chat_tokenizer, chat_template_args=without)
    assert prompts.tokens("2?")[0] == prompts.tokens([says("user", "2?")])[0] == "2? no"
    assert prompts.warnings() == []
    [warning] = PromptFormat(chat_tokenizer, chat_template_args=unread).warnings()
    assert "does not read thinkin (task.chatTemplateArgs)" in warning
    with pytest.raises(
        BadInput, match=r"task\.chatTemplateArgs: expected a tokenizer with a chat template, found none"
    ):
        PromptFormat(tokenizer, chat_template_args=without)
    with pytest.raises(BadInput, match="multiple values for keyword argument 'messages'"):
        PromptFormat(chat_tokenizer, chat_template_args={"messages": []})


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


def test_a_template_that_refuses_a_system_message_or_a_question_is_named(chat_tokenizer: Any) -> None:
    for template in (REFUSES_SYSTEM + USER_ONLY, USER_ONLY):
        chat_tokenizer.chat_template = template
        with pytest.raises(BadInput, match=r"task\.systemPrompt: .*put the text into task\.promptTemplate") as raised:
            PromptFormat(chat_tokenizer, system_prompt="be brief")
        assert raised.value.field == ("spec", "task", "systemPrompt")
        assert PromptFormat(chat_tokenizer, template="Be brief. {question}").tokens("2?")[0] == "Be brief. 2?"
    chat_tokenizer.chat_template = "{{ messages[1].content.x.y }}" + USER_ONLY
    with pytest.raises(BadInput, match=r"expected a prompt from the chat template in .*; correct the template"):
        PromptFormat(chat_tokenizer, system_prompt="be brief")
    chat_tokenizer.chat_template = (
        "{% if messages[0].content == 'x' %}{{ raise_exception('not x') }}{% endif %}" + USER_ONLY
    )
    with pytest.raises(BadInput, match="TemplateError: not x"):
        PromptFormat(chat_tokenizer).tokens("x")


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


def test_half_of_a_character_is_named(tokenizer: Any, chat_tokenizer: Any) -> None:
    for prompts in (PromptFormat(tokenizer), PromptFormat(chat_tokenizer)):
        with pytest.raises(BadInput, match=r"found half of a character in '.*ab \\ud83d c"):
            prompts.tokens("ab \ud83d c")


def test_tokens_that_the_model_lacks_are_named_with_both_sizes(tokenizer: Any) -> None:
    larger, other_end = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    larger.add_tokens(["<tool>"], special_tokens=True)
    text, rows = "2+2 <tool>", len(tokenizer)
    with pytest.raises(
        BadInput, match=rf"below {rows}, .* found {rows} \('<tool>'\) .* {rows + 1} tokens in '2\+2 <tool>'"
    ):
        PromptFormat(larger, vocabulary=rows).tokens(text)
    assert rows in PromptFormat(larger, vocabulary=rows + 1).tokens(text)[1]
    other_end.add_special_tokens({"eos_token": "<stop>"})
    with pytest.raises(BadInput, match=rf"end-of-sequence token .* below {rows}, .*'<stop>'.*no response"):
        PromptFormat(other_end, vocabulary=rows)
    PromptFormat(other_end, vocabulary=len(other_end))


# --- the check of a source ---


def task_of(tokenizer: Any, *questions: str, max_prompt_tokens: int = 4) -> Task:
    items = [Item(question, {"question": question}) for question in questions]
    return Task(
        "sums", items, [Reward("none", lambda answer, record: 0.0)], PromptFormat(tokenizer), max_prompt_tokens, seed=0
    )


def ignore(_progress: str) -> None:
    pass


def test_the_longest_prompt_of_the_source_is_named_with_the_value_to_write(tokenizer: Any) -> None:
    task = task_of(tokenizer, "1+1", "12345678", "12+34+5", "2+2")
    with pytest.raises(BadInput) as raised:
        check_prompts(task, "Fail", ignore)
    assert str(raised.value) == (
        "expected prompts of at most 4 tokens, found 8 in prompt 1 of the task sums ('12345678'); "
        "2 prompts are longer, of 4. Write algorithm.maxPromptTokens: 8, or task.overlongPrompts: Skip"
    )
    raised_limit = task_of(tokenizer, "1+1", "12345678", "12+34+5", "2+2", max_prompt_tokens=8)
    assert check_prompts(raised_limit, "Fail", ignore).task is raised_limit


def test_skipping_is_advised_only_if_it_can_be_done(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"1 prompt is longer, of 2\. Write algorithm\.maxPromptTokens: 5$"):
        check_prompts(task_of(tokenizer, "1+1", "12345"), "Fail", ignore, may_skip=False)
    with pytest.raises(BadInput, match=r"2 prompts are longer, of 2\. Write algorithm\.maxPromptTokens: 6$"):
        check_prompts(task_of(tokenizer, "12345", "123456"), "Skip", ignore)
    monkeypatch.setattr(prompt_check, "_MOST_ITEMS_TO_SKIP_FROM", 1)
    with pytest.raises(BadInput, match="Skip supports at most 1 prompts, found 2"):
        check_prompts(task_of(tokenizer, "1", "2"), "Skip", ignore)


def test_skipped_prompts_are_never_drawn_and_the_others_keep_their_numbers(tokenizer: Any) -> None:
    checked = check_prompts(task_of(tokenizer, "12345678", "1+1", "123456", "2+2"), "Skip", ignore)
    assert (checked.skipped, checked.checked, checked.longest_tokens) == (2, 4, 8)
    assert len(checked.task) == 2
    for step in range(1, 10):
        drawn = checked.task.prompts(step, 2)
        assert sorted((prompt.index, prompt.text) for prompt in drawn) == [(1, "1+1"), (3, "2+2")]
    assert try_out(checked.task, ScoringHere(checked.task.rewards), TaskSpec(name="digits")) == []


def test_an_empty_or_broken_prompt_is_found_anywhere(tokenizer: Any) -> None:
    for overlong in ("Fail", "Skip"):
        with pytest.raises(BadInput, match="expected text in prompt 2"):
            check_prompts(task_of(tokenizer, "1", "2", ""), overlong, ignore)
    with pytest.raises(BadInput, match=r"^prompt 1 of the task sums: expected text that can be written") as raised:
        check_prompts(task_of(tokenizer, "1", "\ud83d"), "Fail", ignore)
    assert raised.value.field == ("spec", "task", "args")


def test_the_check_of_a_slow_source_ends_in_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_check, "_MOST_SECONDS", 0.0)
    task = task_of(tokenizer, "1+1", "12345678")
    checked = check_prompts(task, "Fail", ignore)
    assert checked.checked == 1
    with pytest.raises(BadInput, match=r"found 8 in prompt 1 .*write algorithm\.maxPromptTokens: 8 or more"):
        checked.task.prompt(1)
    assert check_prompts(task, "Skip", ignore).checked == 2, "all attempts must skip the same prompts"


def test_a_conversation_that_ends_with_an_answer_is_warned_about(chat_tokenizer: Any) -> None:
    def warnings(*conversation: dict[str, str]) -> list[str]:
        items = [Item(list(conversation), {})]
        return Task("sums", items, [], PromptFormat(chat_tokenizer), 99, seed=0).warnings()

    assert warnings(says("user", "1+1")) == []
    [warning] = warnings(says("user", "1+1"), says("assistant", "2"))
    assert "conversation in prompt 0 of the task sums ends with a message of the assistant" in warning


def test_a_long_check_shows_its_progress(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_check, "_PROGRESS_SECONDS", 0.0)
    shown: list[str] = []
    check_prompts(task_of(tokenizer, "1", "2"), "Fail", shown.append)
    assert shown == ["checking the prompts: 1 of 2", "checking the prompts: 2 of 2"]
