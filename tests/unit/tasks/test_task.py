from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_api.task_args import JsonlArgs
from rljob_client.errors import BadInput
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.jsonl import read_items
from rljob_trainer.tasks.scoring import ScoringHere
from rljob_trainer.tasks.step_rewards import step_rewards
from rljob_trainer.tasks.task import Task, prompts_of_step

_module_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _import_path_stays_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def task_of(spec: dict[str, Any], tokenizer: Any, directory: Path, *, max_prompt_tokens: int = 200) -> Task:
    return build_task(TaskSpec.model_validate(spec), tokenizer, max_prompt_tokens, directory, seed=0)


def score(task: Task, prompt: Prompt, completion: Completion) -> float:
    """The reward of one response, computed in this process."""
    scoring = ScoringHere(task.reward).begin([prompt], 1)
    scoring.add(0, [completion])
    [reward] = step_rewards(task, [prompt], [completion], scoring.results(stop_at_failure=True), "Fail").rewards
    return reward


def module(directory: Path, source: str) -> str:
    """A new module in `directory`, with a name that has never been imported."""
    name = f"functions_of_test_{next(_module_numbers)}"
    (directory / f"{name}.py").write_text(source)
    return name


def response(text: str, token_ids: list[int] | None = None) -> Completion:
    ids = token_ids or []
    return Completion(ids, [-1.0] * len(ids), finished=True, text=text)


class TestDigits:
    def test_its_ten_prompts_are_a_digit_and_a_colon(self, tokenizer: Any, tmp_path: Path) -> None:
        task = task_of({"name": "digits"}, tokenizer, tmp_path)
        assert sorted(prompt.text for prompt in task.prompts(1, 10)) == [f"{digit}:" for digit in range(10)]
        assert all(len(prompt.token_ids) == 2 for prompt in task.prompts(1, 10))

    def test_the_reward_is_the_share_of_tokens_that_are_the_digit(self, tokenizer: Any, tmp_path: Path) -> None:
        task = task_of({"name": "digits"}, tokenizer, tmp_path)
        seven, six = tokenizer("76").input_ids
        assert score(task, task.prompt(7), response("7767", [seven, seven, six, seven])) == 0.75
        assert score(task, task.prompt(6), response("7767", [seven, seven, six, seven])) == 0.25
        assert score(task, task.prompt(7), response("")) == 0.0


ONE_DIGIT_SUMS: dict[str, Any] = {
    "name": "reasoning-gym",
    "args": {"dataset": "chain_sum", "size": 40, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "answer": {"pattern": r"(-?\d+)"},
}


class TestReasoningGym:
    def test_its_own_verifier_scores_the_extracted_answer(self, chat_tokenizer: Any, tmp_path: Path) -> None:
        task = task_of(ONE_DIGIT_SUMS, chat_tokenizer, tmp_path)
        prompt = task.prompt(3)
        answer = prompt.item["answer"]
        assert prompt.item["question"] in prompt.text
        assert score(task, prompt, response(f"It is {answer}.")) == 1.0
        assert score(task, prompt, response(f"It is {int(answer) + 1}.")) < 0.5
        assert score(task, prompt, response("")) < 0.5

    def test_its_items_are_the_same_in_every_attempt(self, chat_tokenizer: Any, tmp_path: Path) -> None:
        first, second = (task_of(ONE_DIGIT_SUMS, chat_tokenizer, tmp_path) for _ in range(2))
        assert first.prompts(2, 5) == second.prompts(2, 5)

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ({"dataset": "chain_sums"}, "did you mean chain_sum"),
            ({"dataset": "chain_sum", "min_term": 3}, "has no argument 'min_term': did you mean min_terms"),
            ({"dataset": "chain_sum", "zzz": 3}, "it has allow_negation, max_digits, "),
            ({"dataset": "chain_sum", "min_terms": 5, "max_terms": 2}, "max_terms"),
        ],
    )
    def test_an_unknown_data_set_or_setting_is_named(
        self, tokenizer: Any, tmp_path: Path, args: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(BadInput, match=message):
            task_of({"name": "reasoning-gym", "args": args}, tokenizer, tmp_path)


class TestJsonl:
    def test_prompts_and_records_come_from_the_lines(self, tokenizer: Any, tmp_path: Path) -> None:
        lines = [{"q": "two", "a": "2", "level": 1}, {"q": "three", "a": "3"}]
        (tmp_path / "items.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
        name = module(tmp_path, "def same(answer, record):\n    return answer == record['answer']\n")
        spec = {
            "name": "jsonl",
            "args": {"path": "items.jsonl", "promptField": "q", "answerField": "a"},
            "reward": f"{name}:same",
        }
        task = task_of(spec, tokenizer, tmp_path)
        assert [task.prompt(index).text for index in range(len(task))] == ["two", "three"]
        assert task.prompt(0).item["level"] == 1
        assert score(task, task.prompt(1), response(" 3\n")) == 1.0
        assert score(task, task.prompt(1), response("2")) == 0.0

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"prompt": "a"}\n{"prompt": ', "line 2: expected one JSON object"),
            ('{"prompt": "a"}\n\n["b"]', "line 3: expected a JSON object, found list"),
            ('{"question": "a"}', "line 1: expected the prompt as text in the field 'prompt', found none"),
            ('{"prompt": 7}', "found int"),
            ("\n", "expected at least one item in the task jsonl, found none"),
        ],
    )
    def test_an_unusable_file_is_refused_with_the_line(
        self, tokenizer: Any, tmp_path: Path, content: str, message: str
    ) -> None:
        (tmp_path / "items.jsonl").write_text(content)
        name = module(tmp_path, "def one(answer, record):\n    return 1\n")
        with pytest.raises(BadInput, match=message):
            task_of({"name": "jsonl", "args": {"path": "items.jsonl"}, "reward": f"{name}:one"}, tokenizer, tmp_path)

    def test_a_missing_file_is_named(self, tokenizer: Any, tmp_path: Path) -> None:
        name = module(tmp_path, "def one(answer, record):\n    return 1\n")
        with pytest.raises(BadInput, match=str(tmp_path / "none.jsonl")):
            task_of({"name": "jsonl", "args": {"path": "none.jsonl"}, "reward": f"{name}:one"}, tokenizer, tmp_path)


class TestPythonTask:
    def test_a_function_gives_the_items(self, tokenizer: Any, tmp_path: Path) -> None:
        name = module(
            tmp_path,
            "def items(count):\n    return ({'prompt': 'x' * n, 'length': n} for n in range(1, count + 1))\n"
            "def reward(answer, record):\n    return -abs(len(answer) - record['length'])\n",
        )
        spec = {"name": f"{name}:items", "args": {"count": 3}, "reward": f"{name}:reward"}
        task = task_of(spec, tokenizer, tmp_path)
        assert len(task) == 3
        assert task.prompt(1).text == "xx"
        assert score(task, task.prompt(1), response("12345")) == -3.0

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("raise OSError('no disk')", "raised OSError: no disk"),
            ("return None", "expected a list of items .* found NoneType"),
            ("return [{'prompt': 'a'}, {'text': 'b'}]", "^item 1 of .* found none in the fields text; return"),
            ("return []", "expected at least one item"),
        ],
    )
    def test_a_function_that_gives_no_items_is_refused(
        self, tokenizer: Any, tmp_path: Path, body: str, message: str
    ) -> None:
        name = module(tmp_path, f"def items():\n    {body}\ndef reward(answer, record):\n    return 0\n")
        with pytest.raises(BadInput, match=message):
            task_of({"name": f"{name}:items", "reward": f"{name}:reward"}, tokenizer, tmp_path)

    def test_a_missing_module_or_function_is_named(self, tokenizer: Any, tmp_path: Path) -> None:
        spec = {"name": "digits", "reward": "no_such_module:reward"}
        with pytest.raises(BadInput, match=r"cannot import no_such_module .* expected no_such_module.py in"):
            task_of(spec, tokenizer, tmp_path)
        name = module(tmp_path, "import no_such_helper\n")
        with pytest.raises(BadInput, match=r"expected no_such_helper\.py in"):
            task_of({"name": "digits", "reward": f"{name}:reward"}, tokenizer, tmp_path)
        name = module(tmp_path, "def reward(answer, record)\n")
        with pytest.raises(BadInput, match=r"SyntaxError: expected ':' .*; correct that module"):
            task_of({"name": "digits", "reward": f"{name}:reward"}, tokenizer, tmp_path)
        name = module(tmp_path, "def other(): ...\n")
        with pytest.raises(BadInput, match=f"expected a function reward in .*{name}.py"):
            task_of({"name": "digits", "reward": f"{name}:reward"}, tokenizer, tmp_path)


class TestReward:
    @pytest.mark.parametrize(
        ("expression", "message"),
        [
            ("float('nan')", "returned nan, expected a finite number"),
            ("float('-inf')", "returned -inf"),
            ("'0.5'", "returned '0.5'"),
            ("None", "returned None"),
            ("1 / 0", "raised ZeroDivisionError"),
        ],
    )
    def test_a_reward_that_is_not_finite_is_refused_with_its_prompt(
        self, tokenizer: Any, tmp_path: Path, expression: str, message: str
    ) -> None:
        name = module(tmp_path, f"def reward(answer, record):\n    return {expression}\n")
        task = task_of({"name": "digits", "reward": f"{name}:reward"}, tokenizer, tmp_path)
        with pytest.raises(BadInput, match=message) as raised:
            score(task, task.prompt(4), response("four"))
        assert f"{name}:reward" in str(raised.value)
        assert "prompt 4 of the task digits and the response 'four'" in str(raised.value)

    @pytest.mark.parametrize(
        ("expression", "value"), [("True", 1.0), ("np.float32(0.5)", 0.5), ("np.bool_(False)", 0.0), ("-2", -2.0)]
    )
    def test_numbers_of_every_kind_are_rewards(
        self, tokenizer: Any, tmp_path: Path, expression: str, value: float
    ) -> None:
        name = module(tmp_path, f"import numpy as np\ndef reward(answer, record):\n    return {expression}\n")
        task = task_of({"name": "digits", "reward": f"{name}:reward"}, tokenizer, tmp_path)
        assert score(task, task.prompt(0), response("")) == value


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_separator_within_a_string_does_not_end_the_line(separator: str, tmp_path: Path) -> None:
    prompt = f"Given f(x){separator}find x"
    text = json.dumps({"prompt": prompt}, ensure_ascii=False)
    (tmp_path / "prompts.jsonl").write_text(f"{text}\r\n{text}\n", encoding="utf-8", newline="")
    items = read_items(JsonlArgs(path="prompts.jsonl"), tmp_path)
    assert [item.question for item in items] == [prompt, prompt]


class TestPromptLimit:
    def test_a_longer_prompt_is_refused_with_its_index_length_and_the_limit(
        self, tokenizer: Any, tmp_path: Path
    ) -> None:
        spec = {"name": "digits", "promptTemplate": "copy {question}"}
        assert len(task_of(spec, tokenizer, tmp_path, max_prompt_tokens=7).prompt(0).token_ids) == 7
        with pytest.raises(BadInput, match="at most 6 tokens, found 7 in prompt 3 of the task digits"):
            task_of(spec, tokenizer, tmp_path, max_prompt_tokens=6).prompt(3)

    def test_an_empty_prompt_is_refused(self, tokenizer: Any, tmp_path: Path) -> None:
        name = module(
            tmp_path, "def items():\n    return [{'prompt': ''}]\ndef reward(answer, record):\n    return 0\n"
        )
        task = task_of({"name": f"{name}:items", "reward": f"{name}:reward"}, tokenizer, tmp_path)
        with pytest.raises(BadInput, match="expected text in prompt 0"):
            task.prompt(0)


def test_tasks_run_without_torch() -> None:
    import subprocess

    check = "import sys, rljob_trainer.tasks.build; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_huge_source_is_permuted_without_a_list_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.process_time()
    drawn = [index for step in range(1, 51) for index in prompts_of_step(step, 16, 2**31 - 1, seed=7)]
    assert time.process_time() - started < 20
    assert len(set(drawn)) == 800
    assert all(0 <= index < 2**31 - 1 for index in drawn)
    assert drawn[:16] == prompts_of_step(1, 16, 2**31 - 1, seed=7) != prompts_of_step(1, 16, 2**31 - 1, seed=8)

    monkeypatch.setattr("rljob_trainer.tasks.task._LARGEST_SHUFFLED_SOURCE", 10)
    for size in (11, 64, 100):
        epochs = [prompts_of_step(epoch, size, size, seed=0) for epoch in (1, 2)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]
