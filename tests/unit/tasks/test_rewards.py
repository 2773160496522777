"""Answers in responses, reward functions that raise or return anything, and their trial before the start."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import AnswerSpec, TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.reward_pool import RewardPool
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.rewards import Response, Reward, extract_answer, response_with
from rljob_trainer.tasks.scoring import RewardFailure, ScoringHere, compute_rewards
from rljob_trainer.tasks.step_rewards import step_rewards, try_out
from rljob_trainer.tasks.task import Item, Task

REWARDS = """
import asyncio, decimal, sys
import numpy as np

class Silent:
    def __repr__(self):
        raise SystemExit("no text")
class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt

def none(answer, record): return None
def mapping(answer, record): return {"value": 1.0}
def several(answer, record): return [1.0]
def leaves(answer, record): sys.exit(3)
async def awaits(answer, record):
    await asyncio.sleep(0)
    return 1.0
def half_precision(answer, record): return np.float16(0.5)
def same(answer, record): return float(answer == record["answer"])
def among(answer, record): return float(answer in record["answer"])
def first_word(answer, record): return float(answer.split()[0] == record["answer"])
def first_prompt_fails(answer, record):
    if record["answer"] == "0":
        raise LookupError("first")
    return float(answer == record["answer"])
def fails_for_answer(answer, record): return 1e39 if answer else 0.0
async def fails_late(answer, record): raise LookupError("late")
def reward(answer, record):
    BODY
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path, "pass")
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("unusable_rewards", None)


def write(directory: Path, body: str) -> None:
    """Write the module, with this body of the function `reward`."""
    (directory / "unusable_rewards.py").write_text(REWARDS.replace("BODY", body), encoding="utf-8")


def spec_of(function: str, **settings: Any) -> TaskSpec:
    return TaskSpec.model_validate({"name": "digits", "reward": f"unusable_rewards:{function}", **settings})


def response(text: str = "7") -> Completion:
    return Completion([1], [-1.0], True, text)


RESPONSE = Response.of(Prompt(0, [1], ""), response())


def computed(function: str, directory: Path) -> float | RewardFailure:
    """The result of a function of the module, or of one with this body."""
    if " " in function:
        write(directory, function)
    source = RewardSource(spec_of("reward" if " " in function else function), directory, 0)
    [[result]] = compute_rewards(source.load()[0], [[RESPONSE]])
    return result


@pytest.mark.parametrize(
    ("function", "message", "advice"),
    [
        ("return 10**400", "returned 1000.*, expected a finite number between -1e38 and 1e38", ""),
        ("return -(10**5000)", "returned an object of the type int, expected a finite number between", ""),
        ("return 1e39", r"returned 1e\+39, expected a finite number between", ""),
        ("return np.float64(-2e38)", r"returned .*-2e\+38.*, expected a finite number between", ""),
        ("return float('nan')", "returned nan, expected a finite number", ""),
        ("return Silent()", "returned an object of the type Silent, expected a finite number", "float()"),
        ("mapping", "returned {'value': 1.0}", "return one number, such as one of the values of this dict"),
        ("several", r"returned \[1.0\]", "called for each response on its own"),
        ("return '1.0'", "returned '1.0'", "float()"),
        ("return decimal.Decimal(1)", "returned Decimal", "float()"),
        ("return np.array([1.0])", r"returned array\(\[1", "float()"),
        ("return none", "returned <function none", "call it"),
        ("yield 1.0", "returned <generator", "return in place of yield"),
        ("leaves", r"called sys\.exit\(3\)", ""),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt", ""),
        ("raise Mute", r"raised Mute: \(an error without text\)", ""),
        (r"raise ValueError('\ud83d')", r"raised ValueError: \\ud83d", ""),
        ("fails_late", "raised LookupError: late", ""),
    ],
)
def test_every_failure_of_a_call_says_what_to_write(function: str, message: str, advice: str, directory: Path) -> None:
    failure = computed(function, directory)
    assert isinstance(failure, RewardFailure)
    assert re.search(message, failure.message), failure.message
    assert advice in failure.advice
    assert bool(advice) == bool(failure.advice)


PRINTS = r"print('\ud83d'); return 1.0"


@pytest.mark.parametrize(
    ("function", "value"),
    [
        ("awaits", 1),
        (PRINTS, 1),
        ("half_precision", 0.5),
        ("return np.bool_(0)", 0),
        ("return True", 1),
        ("return -2", -2),
        ("return {'score': 0.5, 'acc': True}", 0.5),
    ],
)
def test_numbers_of_every_kind_are_rewards(function: str, value: float, directory: Path) -> None:
    assert computed(function, directory) == value


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("sys.exit(3)", None),
        ("raise KeyboardInterrupt", None),
        ("return Silent()", None),
        (r"raise ValueError('\ud83d')", None),
        (PRINTS, 1.0),
    ],
)
def test_failures_in_another_process_do_not_end_it(body: str, reward: float | None, directory: Path) -> None:
    write(directory, body)
    source, log = RewardSource(spec_of("reward"), directory, 0), directory / "rewards.log"
    with RewardPool(source, source.load(), workers=1, timeout_seconds=60, log=log) as pool:
        scoring = pool.begin([Prompt(0, [1], "", {"answer": "7"})], 2)
        scoring.add(0, [response(), response()])
        [results] = scoring.results(stop_at_failure=False)
        assert len(pool._workers) == 1
    if reward is not None:
        assert results == [reward, reward]
    for result in results if reward is None else ():
        assert isinstance(result, RewardFailure)
        assert "ended its process" not in result.message


def test_a_stop_is_no_failure_of_the_function() -> None:
    class Stop(KeyboardInterrupt):
        pass

    def stopped(answer: str, record: dict[str, Any]) -> float:
        raise Stop

    with pytest.raises(Stop):
        compute_rewards(Reward("stopped", stopped), [[RESPONSE]])


def task_of(spec: TaskSpec, directory: Path, tokenizer: Any, answers: list[Any]) -> Task:
    items = [Item("q", {"prompt": "q"} | ({} if answer is None else {"answer": answer})) for answer in answers]
    return Task("jsonl", items, RewardSource(spec, directory, 0).load(), PromptFormat(tokenizer), 8, seed=0)


def trial(directory: Path, tokenizer: Any, function: str, answers: list[Any], **settings: Any) -> list[str]:
    spec = spec_of(function, **settings)
    task = task_of(spec, directory, tokenizer, answers)
    return try_out(task, ScoringHere(task.rewards), spec)


ZERO = {"onRewardError": "Zero"}
PATTERN = {"pattern": "<answer>(.*?)</answer>"}


@pytest.mark.parametrize(
    ("function", "answers", "settings", "message"),
    [
        ("first_word", ["7"], {}, r"must accept every response, even an empty one, or write task\.onRewardError: Zero"),
        ("first_prompt_fails", ["0", "7"], {}, "raised LookupError: first for prompt 0"),
        ("fails_for_answer", ["7"], {}, r"returned 1e\+39, .* for prompt 0 of the task jsonl and the response '7'"),
        ("none", ["7"], {}, "one of the 2 responses tried, found that unusable_rewards:none left all of them out"),
        ("mapping", ["7"], {}, "return one number, such as"),
        ("several", [None], {}, "called for each response on its own$"),
        ("none", ["7", "8"], ZERO, "one of the 4 responses tried, found that unusable_rewards:none left all of them"),
        ("same", [None], ZERO, "one of the 1 responses tried, found none: .* raised KeyError"),
        ("leaves", [None], ZERO, r"one of the 1 responses tried, found none: .*sys\.exit\(3\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_start(
    function: str, answers: list[Any], settings: dict[str, Any], message: str, directory: Path, tokenizer: Any
) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        trial(directory, tokenizer, function, answers, **settings)
    if settings or function in ("none", "mapping", "several"):
        assert "task.onRewardError" not in str(raised.value), "it is set, or would train on zeros"


@pytest.mark.parametrize(
    ("function", "answers", "settings", "warning"),
    [
        ("same", ["7"], {}, None),
        ("same", ["7"], {"answer": PATTERN}, None),
        ("awaits", [None], {}, None),
        ("first_word", ["7"], ZERO, "raised IndexError.* for prompt 0 .*; such responses count as 0"),
        ("first_prompt_fails", ["0", "7"], ZERO, "raised LookupError: first for prompt 0"),
        ("same", [2], {}, r"0 for the answer of prompt 0 .* the answer is not text \(2\), .*str\(record"),
        ("same", [2], {"answer": PATTERN}, "no more than for an empty response; the answer is not text"),
        ("half_precision", ["7"], {}, "returned 0.5 for the answer of prompt 0 .*; check the function and task.answer"),
        ("same", [2, "7"], {}, r"several kinds: number in 1 \(first: 0\), text in 1 \(first: 1\)"),
        ("same", ["7", "8", None], {}, r"several kinds: text in 2 \(first: 0\), none in 1 \(first: 2\)"),
        ("among", [["7", "seven"], ["8"]], {}, None),
        ("same", [{"value": 7}], {}, None),
        ("fails_for_answer", [7], {}, r"returned 1e\+39.*; such responses end the job \(task.onRewardError: Fail\)"),
    ],
)
def test_the_trial_warns_of_rewards_from_which_nothing_is_learned(
    function: str, answers: list[Any], settings: dict[str, Any], warning: str | None, directory: Path, tokenizer: Any
) -> None:
    found = "\n".join(trial(directory, tokenizer, function, answers, **settings))
    assert re.search(warning or "^$", found), found


@pytest.mark.parametrize(
    "pattern",
    [None, "<answer>(.*?)</answer>", r"\\boxed\{(.*?)\}", r"####\s*(-?[0-9.,]+)", r"^Answer: (\w+)$", r"\((\d)\)"],
)
def test_a_response_with_a_given_answer_is_found_for_usual_patterns(pattern: str | None) -> None:
    spec = None if pattern is None else AnswerSpec(pattern=pattern)
    right = response_with("7", spec)
    assert right is not None
    assert extract_answer(right, spec) == "7"
    assert response_with("seven", AnswerSpec(pattern=r"(-?\d+)")) is None


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ({"pattern": "<answer>(.*?)</answer>", "match": "First"}, "1"),
        ({"pattern": "<answer>(.*?)</answer>", "match": "Last"}, "2"),
        ({"pattern": r"(\d{3})"}, ""),
        (None, "First <answer>1</answer>, no: <answer>\n 2\n</answer>"),
    ],
)
def test_the_answer_is_the_chosen_match_or_the_stripped_response(spec: dict[str, Any] | None, answer: str) -> None:
    text = "  First <answer>1</answer>, no: <answer>\n 2\n</answer> \n"
    assert extract_answer(text, AnswerSpec.model_validate(spec) if spec else None) == answer


def test_a_failure_of_a_step_is_refused_with_its_prompt_or_counted(directory: Path, tokenizer: Any) -> None:
    write(directory, "return 1e39")
    task = task_of(spec_of("reward"), directory, tokenizer, ["7"])
    prompts, completions = [task.prompt(0)], [response("a"), response("b")]
    scoring = ScoringHere(task.rewards).begin(prompts, 2)
    scoring.add(0, completions)
    results = scoring.results(stop_at_failure=False)
    with pytest.raises(BadInput, match=r"returned 1e\+39, .* for prompt 0 of the task jsonl and the response 'a'"):
        step_rewards(task, prompts, completions, results, "Fail")
    counted = step_rewards(task, prompts, completions, results, "Zero")
    assert (counted.rewards, counted.failures) == ([0.0, 0.0], 2)
