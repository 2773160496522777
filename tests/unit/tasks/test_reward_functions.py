"""Signatures of reward functions, functions that score a group, and several functions with weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.reward_pool import RewardPool
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.rewards import Response
from rljob_trainer.tasks.scoring import RewardFailure, Scorer, ScoringHere, compute_rewards
from rljob_trainer.tasks.step_rewards import StepRewards, step_rewards, try_out
from rljob_trainer.tasks.task import Item, Task

FUNCTIONS = """
import asyncio, os, time
import numpy as np

seen = {}
def keep(**values):
    seen.clear()
    seen.update(values)

def by_position(response, item): keep(response=response, item=item); return 1
def by_name(record, answer): keep(record=record, answer=answer); return 1
def whole(prompt, completion, completion_ids, finish_reason="?"):
    keep(prompt=prompt, completion=completion, ids=completion_ids, reason=finish_reason); return 1
def with_arguments(answer, record, *, factor, offset=1): return factor * len(answer) + offset
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    keep(source=data_source, solution=solution_str, truth=ground_truth, extra=extra_info, more=kwargs)
    return {"score": 0.5, "acc": True}
def of_trl(completions, **kwargs): keep(completions=completions, **kwargs); return [1.0] * len(completions)
def of_trl_column(prompts, completions, solution):
    return [float(p == "1+1" and c == s) for p, c, s in zip(prompts, completions, solution)]
def of_trl_ids(completion_ids, **kwargs): return [-float(len(ids)) for ids in completion_ids]
async def of_trl_async(completions, **kwargs):
    await asyncio.sleep(0)
    return np.asarray([len(each) for each in completions])
class Overlong:
    def __call__(self, completion_ids, **kwargs): return [0.25] * len(completion_ids)
overlong = Overlong()
def relative(answers, records): return [float(len(a) == max(map(len, answers))) for a in answers]
def strange(one): return 1
def too_few(completions, **kwargs): return [1.0] * (len(completions) - 1)
def no_list(completions, **kwargs): return 1.0
def text(completions, **kwargs): return "ab"
def one_bad(completions, **kwargs): return [1.0, "x"]
def some_left_out(completions, **kwargs): return [None if c == "b" else 2.0 for c in completions]

def same(answer, record): return float(answer == record["answer"])
def length(answer): return len(answer)
def only_math(answer, record): return 1.0 if record.get("kind") == "math" else None
def only_b(answer): return 3.0 if answer == "b" else None
def fails_for_b(answer):
    if answer == "b":
        raise LookupError("b")
    return 1.0
def hangs(completions, **kwargs): time.sleep(3600)
async def waits(answer):
    await asyncio.sleep(3600 if answer == "b" else 0)
    return 1.0
async def blocks(answer): time.sleep(3600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "reward_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("reward_functions", None)


def source_of(directory: Path, *rewards: dict[str, Any], name: str = "digits", **settings: Any) -> RewardSource:
    functions = [
        reward | ({"function": f"reward_functions:{reward['function']}"} if "function" in reward else {})
        for reward in rewards
    ]
    spec = TaskSpec.model_validate({"name": name, "rewards": functions, **settings})
    return RewardSource(spec, directory, 0)


RECORD = {"prompt": "1+1", "answer": "2", "solution": "b", "data_source": "sums", "extra_info": {"level": 1}}
COMPLETIONS = [Completion([5, 6], [0.0, 0.0], True, " a "), Completion([7], [0.0], False, "b")]
GROUP = [Response.of(Prompt(0, [1], "<user>1+1<assistant>", RECORD), each) for each in COMPLETIONS]


def called(directory: Path, function: str, responses: list[Response], **settings: Any) -> Any:
    """The results of one call, and the arguments that the function has kept."""
    [reward] = source_of(directory, {"function": function, **settings}).load()
    results = compute_rewards(reward, [responses])[0]
    return results, sys.modules["reward_functions"].seen


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("by_position", {"response": "a", "item": RECORD}),
        ("by_name", {"answer": "a", "record": RECORD}),
        ("whole", {"prompt": "1+1", "completion": " a ", "ids": [5, 6], "reason": "stop"}),
        (
            "compute_score",
            {"source": "sums", "solution": " a ", "truth": "2", "extra": {"level": 1}, "more": {}},
        ),
    ],
)
def test_arguments_are_passed_by_the_names_of_parameters(
    function: str, arguments: dict[str, Any], directory: Path
) -> None:
    results, seen = called(directory, function, GROUP[:1])
    assert results == [0.5 if function == "compute_score" else 1.0]
    assert seen == arguments


def test_a_response_that_was_cut_has_the_reason_length(directory: Path) -> None:
    _, seen = called(directory, "whole", GROUP[1:])
    assert (seen["reason"], seen["ids"]) == ("length", [7])


def test_arguments_of_the_manifest_are_passed_too(directory: Path) -> None:
    assert called(directory, "with_arguments", GROUP[:1], args={"factor": 3})[0] == [4.0]
    assert called(directory, "with_arguments", GROUP[:1], args={"factor": 3, "offset": 0})[0] == [3.0]
    with pytest.raises(BadInput, match="has no parameter 'factr'"):
        called(directory, "with_arguments", GROUP[:1], args={"factr": 3})
    with pytest.raises(BadInput, match="missing a required argument: 'factor'"):
        called(directory, "with_arguments", GROUP[:1])


def test_other_signatures_are_refused_with_those_that_are_possible(directory: Path) -> None:
    with pytest.raises(BadInput, match=r"expected strange\(answer: str, record: dict\) -> float, or parameters among "):
        called(directory, "strange", GROUP[:1])


def test_trl_functions_receive_columns_and_texts(directory: Path) -> None:
    results, seen = called(directory, "of_trl", GROUP)
    assert results == [1.0, 1.0]
    assert seen["prompts"] == ["1+1", "1+1"]
    assert seen["completions"] == [" a ", "b"]
    assert seen["completion_ids"] == [[5, 6], [7]]
    assert seen["solution"] == ["b", "b"]
    assert seen["answer"] == ["2", "2"]
    assert "prompt" not in seen
    seen["log_extra"]("column", [1])


def test_a_conversation_gives_trl_functions_messages(directory: Path) -> None:
    messages = [{"role": "user", "content": "1+1"}]
    group = [Response.of(Prompt(0, [1], "<user>1+1", {"prompt": messages}), each) for each in COMPLETIONS]
    _, seen = called(directory, "of_trl", group)
    assert seen["prompts"] == [messages, messages]
    assert seen["completions"][1] == [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("function", "results"),
    [
        ("of_trl_column", [0.0, 1.0]),
        ("of_trl_ids", [-2.0, -1.0]),
        ("of_trl_async", [3.0, 1.0]),
        ("overlong", [0.25, 0.25]),
        ("some_left_out", [2.0, math.nan]),
    ],
)
def test_functions_of_groups_return_lists(function: str, results: list[float], directory: Path) -> None:
    found, _ = called(directory, function, GROUP)
    assert repr(found) == repr(results)


def test_batch_true_makes_a_function_one_of_groups(directory: Path) -> None:
    assert called(directory, "relative", GROUP, batch=True)[0] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "returned 1 rewards, expected 2, one for each response"),
        ("no_list", "returned 1.0, expected a list of 2 numbers"),
        ("text", "returned 'ab', expected a list of 2 numbers"),
    ],
)
def test_a_wrong_list_fails_for_the_whole_group(function: str, message: str, directory: Path) -> None:
    assert called(directory, function, GROUP)[0] == [RewardFailure(message)] * 2


def test_a_wrong_value_in_a_list_fails_alone(directory: Path) -> None:
    first, second = called(directory, "one_bad", GROUP)[0]
    assert first == 1.0
    assert second.message == "returned 'x', expected a finite number"


def test_a_column_that_the_records_lack_is_named(directory: Path) -> None:
    [first, _] = called(directory, "of_trl_column", [Response.of(Prompt(0, [1], "q", {}), c) for c in COMPLETIONS])[0]
    assert "missing 1 required positional argument: 'solution'" in first.message


# --- several functions ---


def task_of(source: RewardSource, tokenizer: Any, records: list[dict[str, Any]]) -> Task:
    items = [Item("q", {"prompt": "q"} | record) for record in records]
    return Task("jsonl", items, source.load(), PromptFormat(tokenizer), 8, seed=0)


def scored(task: Task, scorer: Scorer, texts: list[str], on_error: Any = "Fail") -> StepRewards:
    """The rewards of groups with these texts, one for each item of the task."""
    prompts = [task.prompt(index) for index in range(len(task))]
    completions = [Completion([1], [0.0], True, text) for _ in prompts for text in texts]
    scoring = scorer.begin(prompts, len(texts))
    scoring.add(0, completions)
    return step_rewards(task, prompts, completions, scoring.results(stop_at_failure=False), on_error)


def test_the_reward_is_the_weighted_sum_of_those_that_are_not_left_out(directory: Path, tokenizer: Any) -> None:
    source = source_of(
        directory,
        {"function": "same", "weight": 2},
        {"function": "length", "weight": -0.5, "name": "brevity"},
        {"function": "only_b"},
    )
    task = task_of(source, tokenizer, [{"answer": "b"}, {"answer": "cc"}])
    found = scored(task, ScoringHere(task.rewards), ["b", "cc"])
    assert found.rewards == [2 - 0.5 + 3, 0 - 1.0, 0 - 0.5 + 3, 2 - 1.0]
    assert repr(found.parts) == repr(
        {
            "same": [1.0, 0.0, 0.0, 1.0],
            "brevity": [1.0, 2.0, 1.0, 2.0],
            "only_b": [3.0, math.nan, 3.0, math.nan],
        }
    )
    assert (found.kept, found.failures) == ([], 0)


def test_a_response_that_all_leave_out_is_not_kept(directory: Path, tokenizer: Any) -> None:
    source = source_of(directory, {"function": "only_math"}, {"function": "only_b"})
    task = task_of(source, tokenizer, [{"kind": "math"}, {"kind": "code"}])
    found = scored(task, ScoringHere(task.rewards), ["a", "b"])
    assert found.rewards == [1.0, 4.0, 0.0, 3.0]
    assert found.kept == [True, True, False, True]


def test_a_function_that_fails_counts_as_zero_beside_the_others(directory: Path, tokenizer: Any) -> None:
    source = source_of(directory, {"function": "fails_for_b", "name": "first"}, {"function": "length"})
    task = task_of(source, tokenizer, [{}])
    found = scored(task, ScoringHere(task.rewards), ["a", "b"], "Zero")
    assert (found.rewards, found.failures) == ([2.0, 1.0], 1)
    message = r"the reward function first \(reward_functions:fails_for_b\) raised LookupError: b for prompt 0"
    assert found.first_failure is not None
    with pytest.raises(BadInput, match=message):
        scored(task, ScoringHere(task.rewards), ["a", "b"])


def test_the_tasks_own_reward_can_be_one_of_several(tokenizer: Any, tmp_path: Path) -> None:
    spec = TaskSpec.model_validate(
        {
            "name": "reasoning-gym",
            "args": {"dataset": "chain_sum", "size": 4},
            "rewards": [{"name": "task"}, {"name": "regex", "weight": 0.5, "args": {"pattern": r"^\d+$"}}],
        }
    )
    source = RewardSource(spec, tmp_path, 0)
    rewards = source.load()
    assert [(reward.label, reward.weight) for reward in rewards] == [("task", 1.0), ("regex", 0.5)]
    record = {"answer": "12", "metadata": {}}
    right = Response.of(Prompt(0, [1], "", record), Completion([1], [0.0], True, "12"))
    assert [compute_rewards(reward, [[right]]) for reward in rewards] == [[[1.0]], [[1.0]]]


@pytest.mark.parametrize(
    ("rewards", "on_error", "message"),
    [
        ([{"function": "fails_for_b"}, {"function": "same"}], "Fail", None),
        ([{"name": "regex", "args": {"pattern": "x"}}], "Fail", None),
        ([{"function": "same", "weight": -1}], "Fail", "no more than for an empty response"),
        ([{"name": "exact_match"}, {"name": "length", "args": {"maxTokens": 9, "bufferTokens": 9}}], "Fail", None),
        ([{"name": "exact_match", "args": {"ignoreCase": True}}], "Fail", None),
    ],
)
def test_the_trial_concerns_functions_that_compare_answers(
    rewards: list[dict[str, Any]], on_error: str, message: str | None, directory: Path, tokenizer: Any
) -> None:
    source = source_of(directory, *rewards, onRewardError=on_error)
    task = task_of(source, tokenizer, [{"answer": "7"}])
    warnings = try_out(task, ScoringHere(task.rewards), source.spec)
    assert len(warnings) == bool(message)
    assert (message or "") in "".join(warnings)


def test_one_of_several_that_always_fails_is_refused_before_the_start(directory: Path, tokenizer: Any) -> None:
    source = source_of(directory, {"function": "too_few"}, {"function": "length"}, onRewardError="Zero")
    task = task_of(source, tokenizer, [{"answer": "7"}, {"answer": "8"}])
    with pytest.raises(BadInput, match="found none: the reward function reward_functions:too_few returned 1 rewards"):
        try_out(task, ScoringHere(task.rewards), source.spec)


def test_a_field_that_no_record_has_is_refused_before_the_start(directory: Path, tokenizer: Any) -> None:
    source = source_of(directory, {"name": "exact_match", "args": {"answerField": "anwser"}})
    task = task_of(source, tokenizer, [{"answer": "7"}])
    with pytest.raises(BadInput, match="exact_match left all of them out"):
        try_out(task, ScoringHere(task.rewards), source.spec)


# --- in processes ---


def in_pool(source: RewardSource, groups: list[list[str]], seconds: float = 60) -> Any:
    with RewardPool(source, source.load(), workers=2, timeout_seconds=seconds) as pool:
        scoring = pool.begin([Prompt(index, [1], "", RECORD) for index in range(len(groups))], len(groups[0]))
        for index, group in enumerate(groups):
            scoring.add(index * len(group), [Completion([1], [0.0], True, text) for text in group])
        return scoring.results(stop_at_failure=False)


def test_processes_call_functions_of_all_kinds(directory: Path) -> None:
    functions = [{"function": name} for name in ("length", "of_trl_async", "waits")]
    source = source_of(directory, *functions, {"function": "relative", "batch": True})
    assert in_pool(source, [["a", "ccc"], ["cc", "a"]]) == [[1, 3, 2, 1], [1, 3, 2, 1], [1] * 4, [0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("function", "seconds", "alone"), [("hangs", 1, False), ("waits", 30, True), ("blocks", 1, False)]
)
def test_calls_end_at_the_time_limit(
    function: str, seconds: int, alone: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An async call that only waits ends alone; one that blocks its process ends with it."""
    monkeypatch.setattr("rljob_trainer.tasks.reward_pool._SECONDS_TO_CANCEL", 1.0)
    late = RewardFailure(f"took more than {seconds} s (task.rewardTimeoutSeconds)")
    [results] = in_pool(source_of(directory, {"function": function}), [["b", "a"]], seconds)
    assert results == ([late, 1.0] if alone else [late, late])


def test_mathematics_without_end_is_worth_nothing(directory: Path) -> None:
    """The text cannot end the job: it is the policy's."""
    source = source_of(directory, {"name": "math_verify"})
    [results] = in_pool(source, [[r"\boxed{9^{9^{9^9}}}", r"\boxed{2}"]], seconds=30)
    assert results == [0.0, 1.0]
