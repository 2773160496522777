"""The task `text`: its lines are prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks.build import build_task


def prompts_of(directory: Path, tokenizer: Any, content: bytes) -> list[str]:
    (directory / "prompts.txt").write_bytes(content)
    reward = {"name": "length", "args": {"maxTokens": 9, "bufferTokens": 3}}
    given = {"name": "text", "args": {"path": "prompts.txt"}, "rewards": [reward]}
    spec = TaskSpec.model_validate(given, by_alias=True, by_name=False)
    task = build_task(spec, tokenizer, 100, directory, seed=0)
    assert [task.prompt(index).item["prompt"] for index in range(len(task))] == [
        task.items[index].question for index in range(len(task))
    ]
    return [task.prompt(index).text for index in range(len(task))]


@pytest.mark.parametrize("content", [b"3:\n4+5=\n", b"\xef\xbb\xbf3:\r\n\r\n  4+5= "])
def test_each_line_with_text_is_a_prompt(tmp_path: Path, tokenizer: Any, content: bytes) -> None:
    assert prompts_of(tmp_path, tokenizer, content) == ["3:", "4+5="]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\xff\n", r"prompts.txt, line 2: expected UTF-8 text, found the byte 0xff; save the file as UTF-8"),
        (b"\n \n", "expected at least one item in the task text, found none"),
    ],
)
def test_a_file_without_usable_lines_is_refused(tmp_path: Path, tokenizer: Any, content: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prompts_of(tmp_path, tokenizer, content)
