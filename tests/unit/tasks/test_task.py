"""The kinds of tasks, from their items to the rewards of responses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_api.task_args import TASKS
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.built_in import task_module
from rljob_trainer.tasks.scoring import ScoringHere
from rljob_trainer.tasks.step_rewards import step_rewards
from rljob_trainer.tasks.task import Task

FUNCTIONS = """
def items(count):
    return ({"prompt": "x" * n, "length": n} for n in range(1, count + 1))
def length(answer, record):
    return -abs(len(answer) - record["length"])
def same(answer, record):
    return answer == record["answer"]
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "functions_of_task", raising=False)
    (tmp_path / "functions_of_task.py").write_text(FUNCTIONS)
    return tmp_path


def task_of(spec: dict[str, Any], tokenizer: Any, directory: Path) -> Task:
    return build_task(TaskSpec.model_validate(spec), tokenizer, 200, directory, seed=0)


def score(task: Task, prompt: Prompt, text: str, token_ids: tuple[int, ...] = ()) -> float:
    """The reward of one response, computed in this process."""
    completion = Completion(list(token_ids), [-1.0] * len(token_ids), finished=True, text=text)
    scoring = ScoringHere(task.rewards).begin([prompt], 1)
    scoring.add(0, [completion])
    [reward] = step_rewards(task, [prompt], [completion], scoring.results(stop_at_failure=True), "Fail").rewards
    return reward


def test_digits_rewards_the_share_of_tokens_that_are_the_digit(tokenizer: Any, directory: Path) -> None:
    task = task_of({"name": "digits"}, tokenizer, directory)
    assert sorted(prompt.text for prompt in task.prompts(1, 10)) == [f"{digit}:" for digit in range(10)]
    assert all(len(prompt.token_ids) == 2 for prompt in task.prompts(1, 10))
    seven, six = tokenizer("76").input_ids
    assert score(task, task.prompt(7), "7767", (seven, seven, six, seven)) == 0.75
    assert score(task, task.prompt(6), "7767", (seven, seven, six, seven)) == 0.25
    assert score(task, task.prompt(7), "") == 0.0


def test_the_verifier_of_reasoning_gym_scores_the_extracted_answer(chat_tokenizer: Any, directory: Path) -> None:
    sums = {"dataset": "chain_sum", "size": 40, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    spec = {"name": "reasoning-gym", "args": sums, "answer": {"pattern": r"(-?\d+)"}}
    task, again = (task_of(spec, chat_tokenizer, directory) for _ in range(2))
    assert task.prompts(2, 5) == again.prompts(2, 5), "the items are the same in every attempt"
    prompt = task.prompt(3)
    answer = prompt.item["answer"]
    assert prompt.item["question"] in prompt.text
    assert score(task, prompt, f"It is {answer}.") == 1.0
    assert score(task, prompt, f"It is {int(answer) + 1}.") < 0.5
    assert score(task, prompt, "") < 0.5


MIXTURE = {
    "size": 200,
    "datasets": [
        {"dataset": "chain_sum", "weight": 3, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        {"dataset": "gcd"},
    ],
}


def test_a_mixture_draws_by_weight_and_scores_each_answer_by_its_data_set(chat_tokenizer: Any, directory: Path) -> None:
    spec = {"name": "reasoning-gym", "args": MIXTURE, "answer": {"pattern": r"(-?\d+)"}}
    task, again = (task_of(spec, chat_tokenizer, directory) for _ in range(2))
    assert task.prompts(2, 20) == again.prompts(2, 20), "the items are the same in every attempt"
    source = [item.record["metadata"]["source_dataset"] for item in map(task.items.__getitem__, range(200))]
    assert 120 <= source.count("chain_sum") <= 180
    assert source.count("chain_sum") + source.count("gcd") == 200
    for name in ("chain_sum", "gcd"):
        prompt = task.items[source.index(name)]
        answer = int(prompt.record["answer"])
        drawn = Prompt(0, [1], "", prompt.record)
        assert score(task, drawn, f"It is {answer}.") == 1.0
        assert score(task, drawn, f"It is {answer + 1}.") < 0.5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "chain_sums"}, "did you mean chain_sum"),
        ({"dataset": "chain_sum", "min_term": 3}, "has no argument 'min_term': did you mean min_terms"),
        ({"dataset": "chain_sum", "zzz": 3}, "it has allow_negation, max_digits, "),
        ({"dataset": "chain_sum", "min_terms": 5, "max_terms": 2}, "max_terms"),
        ({"datasets": [{"dataset": "chain_sums"}]}, "no data set 'chain_sums': did you mean chain_sum"),
        ({"datasets": [{"dataset": "chain_sum", "min_term": 3}]}, "chain_sum has no argument 'min_term': did you mean"),
        ({"datasets": [{"dataset": "chain_sum", "size": 3}]}, "chain_sum has no argument 'size'"),
        (
            {"datasets": [{"dataset": "chain_sum"}], "min_terms": 3},
            "composite has no argument 'min_terms': it has seed",
        ),
        ({"datasets": [{"dataset": "chain_sum"}, {"dataset": "chain_sum"}]}, "Duplicate dataset names"),
        ({"datasets": [{"dataset": "chain_sum", "min_terms": 5, "max_terms": 2}]}, "max_terms"),
    ],
)
def test_an_unusable_data_set_or_mixture_of_reasoning_gym_is_refused(
    tokenizer: Any, directory: Path, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        task_of({"name": "reasoning-gym", "args": args}, tokenizer, directory)


def test_prompts_and_records_come_from_the_lines_of_a_file(tokenizer: Any, directory: Path) -> None:
    lines = [{"q": "two", "a": "2", "level": 1}, {"q": "three", "a": "3"}]
    (directory / "items.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    args = {"path": "items.jsonl", "promptField": "q", "answerField": "a"}
    task = task_of({"name": "jsonl", "args": args, "reward": "functions_of_task:same"}, tokenizer, directory)
    assert [task.prompt(index).text for index in range(len(task))] == ["two", "three"]
    assert task.prompt(0).item["level"] == 1
    assert score(task, task.prompt(1), " 3\n") == 1.0
    assert score(task, task.prompt(1), "2") == 0.0


def test_a_function_gives_the_items(tokenizer: Any, directory: Path) -> None:
    spec = {"name": "functions_of_task:items", "args": {"count": 3}, "reward": "functions_of_task:length"}
    task = task_of(spec, tokenizer, directory)
    assert len(task) == 3
    assert task.prompt(1).text == "xx"
    assert score(task, task.prompt(1), "12345") == -3.0
    with pytest.raises(BadInput, match="expected at least one item in the task functions_of_task:items, found none"):
        task_of(spec | {"args": {"count": 0}}, tokenizer, directory)


def test_tasks_run_without_torch_and_import_a_data_library_only_if_needed() -> None:
    check = "import sys, rljob_trainer.tasks.build; sys.exit(bool({'torch', 'datasets'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("name", TASKS)
def test_the_module_of_a_task_has_what_its_entry_promises(name: str) -> None:
    module = task_module(name)
    assert callable(module.items)
    assert hasattr(module, "reward") == TASKS[name].has_reward
