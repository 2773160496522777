from __future__ import annotations

from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.tasks import prompt_check
from rljob_trainer.tasks.prompt_check import check_prompts
from rljob_trainer.tasks.scoring import ScoringHere
from rljob_trainer.tasks.step_rewards import try_out
from rljob_trainer.tasks.task import Item, PromptFormat, Task


def task_of(tokenizer: Any, *questions: str, max_prompt_tokens: int = 4) -> Task:
    def reward(_record: dict[str, Any], _completion: Completion) -> float:
        return 0.0

    items = [Item(question, {"question": question}) for question in questions]
    named: Any = type("Named", (), {"name": "none", "__call__": staticmethod(reward)})()
    return Task("sums", items, named, PromptFormat(tokenizer), max_prompt_tokens, seed=0)


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


def test_skipping_is_not_advised_if_steps_are_committed(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"1 prompt is longer, of 2\. Write algorithm\.maxPromptTokens: 5$"):
        check_prompts(task_of(tokenizer, "1+1", "12345"), "Fail", ignore, may_skip=False)


def test_skipped_prompts_are_never_drawn_and_the_others_keep_their_numbers(tokenizer: Any) -> None:
    checked = check_prompts(task_of(tokenizer, "12345678", "1+1", "123456", "2+2"), "Skip", ignore)
    assert (checked.skipped, checked.checked, checked.longest_tokens) == (2, 4, 8)
    assert len(checked.task) == 2
    for step in range(1, 10):
        drawn = checked.task.prompts(step, 2)
        assert sorted((prompt.index, prompt.text) for prompt in drawn) == [(1, "1+1"), (3, "2+2")]
    assert try_out(checked.task, ScoringHere(checked.task.reward), TaskSpec(name="digits")) == []


def test_a_source_with_only_long_prompts_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"2 prompts are longer, of 2\. Write algorithm\.maxPromptTokens: 6$"):
        check_prompts(task_of(tokenizer, "12345", "123456"), "Skip", ignore)


def test_an_empty_prompt_is_found_anywhere(tokenizer: Any) -> None:
    for overlong in ("Fail", "Skip"):
        with pytest.raises(BadInput, match="expected text in prompt 2"):
            check_prompts(task_of(tokenizer, "1", "2", ""), overlong, ignore)


def test_the_check_of_a_slow_source_ends_in_time(tokenizer: Any) -> None:
    task = task_of(tokenizer, "1+1", "12345678")
    checked = check_prompts(task, "Fail", ignore, most_seconds=0.0)
    assert checked.checked == 1
    with pytest.raises(BadInput, match=r"found 8 in prompt 1 .*write algorithm\.maxPromptTokens: 8 or more"):
        checked.task.prompt(1)
    assert check_prompts(task, "Skip", ignore, most_seconds=0.0).checked == 2, "all attempts must skip the same prompts"


def test_a_source_that_is_too_large_to_skip_from_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_check, "_MOST_ITEMS_TO_SKIP_FROM", 1)
    with pytest.raises(BadInput, match="Skip supports at most 1 prompts, found 2"):
        check_prompts(task_of(tokenizer, "1", "2"), "Skip", ignore)


def test_a_long_check_shows_its_progress(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_check, "_PROGRESS_SECONDS", 0.0)
    shown: list[str] = []
    check_prompts(task_of(tokenizer, "1", "2"), "Fail", shown.append)
    assert shown == ["checking the prompts: 1 of 2", "checking the prompts: 2 of 2"]


def test_a_prompt_that_cannot_be_encoded_is_named(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"^prompt 1 of the task sums: expected text that can be written") as raised:
        check_prompts(task_of(tokenizer, "1", "\ud83d"), "Fail", ignore)
    assert raised.value.field == ("spec", "task", "args")
