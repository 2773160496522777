"""Items of a task: their order, and data that cannot be used, which is refused with place, cause and remedy."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.task_args import JsonlArgs, ReasoningGymArgs
from rljob_client.errors import BadInput
from rljob_trainer.tasks import jsonl
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.python_functions import call_for_items
from rljob_trainer.tasks.reasoning_gym import ReasoningGymItems
from rljob_trainer.tasks.task import Item, prompts_of_step

sizes = st.integers(1, 50)
counts = st.integers(1, 120)
seeds = st.integers(0, 2**31 - 1)


def drawn(steps: int, count: int, size: int, seed: int) -> list[int]:
    return [index for step in range(1, steps + 1) for index in prompts_of_step(step, count, size, seed)]


@given(size=sizes, count=counts, steps=st.integers(1, 12), seed=seeds)
def test_no_item_is_lost_or_repeated_within_an_epoch(size: int, count: int, steps: int, seed: int) -> None:
    indices = drawn(steps, count, size, seed)
    for start in range(0, len(indices) - size + 1, size):
        assert sorted(indices[start : start + size]) == list(range(size))
    rest = indices[len(indices) - len(indices) % size :]
    assert len(set(rest)) == len(rest)


@given(size=sizes, count=counts, step=st.integers(1, 1000), seed=seeds)
def test_a_step_draws_the_same_items_after_any_others(size: int, count: int, step: int, seed: int) -> None:
    expected = prompts_of_step(step, count, size, seed)
    prompts_of_step(step + 1, count, size, seed)
    assert prompts_of_step(step, count, size, seed) == expected
    # Split in other ways, the same row of items comes out.
    assert drawn(6, count, size, seed) == drawn(3, 2 * count, size, seed)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = prompts_of_step(1, 100, 100, seed=0), prompts_of_step(2, 100, 100, seed=0)
    assert first != second
    assert first != prompts_of_step(1, 100, 100, seed=1)
    assert first != list(range(100))


def test_a_huge_source_is_permuted_without_a_list_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [index for step in range(1, 51) for index in prompts_of_step(step, 16, 2**31 - 1, seed=7)]
    assert len(set(drawn)) == 800
    assert all(0 <= index < 2**31 - 1 for index in drawn)
    assert drawn[:16] == prompts_of_step(1, 16, 2**31 - 1, seed=7) != prompts_of_step(1, 16, 2**31 - 1, seed=8)

    monkeypatch.setattr("rljob_trainer.tasks.task._LARGEST_SHUFFLED_SOURCE", 10)
    for size in (11, 64, 100):
        epochs = [prompts_of_step(epoch, size, size, seed=0) for epoch in (1, 2)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]


# --- data ---


def read(args: JsonlArgs, directory: Path) -> list[Item]:
    return jsonl.items(args, TaskContext(directory))


PROMPT = b'{"prompt": "a"}\n'


def field(value: bytes) -> bytes:
    """Two lines, the second with a field of this value."""
    return PROMPT + b'{"prompt": "b", "level": ' + value + b"}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (field(b"[" * 20_000 + b"]" * 20_000), "line 2: expected at most 100 levels of lists and objects, found more"),
        (field(b"[" * 150 + b"]" * 150), "line 2: expected at most 100 levels .* in the field 'level'"),
        (field(b"9" * 5000), "line 2: .*an integer of 5,000 digits: write it as text"),
        (field(b"NaN"), "line 2: expected finite numbers, found nan in the field 'level'"),
        (field(b"[1, -Infinity]"), "line 2: expected finite numbers, found -inf in the field 'level'"),
        (field(b"1e999"), "line 2: expected finite numbers, found inf in the field 'level'"),
        (field(b'"\xe9"'), "line 2: expected UTF-8 text, found the byte 0xe9 at position 27 of the line; save"),
        (field(b'"\xed\xa0\xbd"'), "line 2: expected UTF-8 text"),
        (field(b'"\0"'), "line 2: expected UTF-8 text, found a zero byte; save the file as UTF-8"),
        (PROMPT + b'{"prompt": "ab \\ud83d c"}', r"line 2: expected text in the field 'prompt', found half of a char"),
        (PROMPT + b'{"prompt": "a", "answer": "\\udc00"}', r"line 2: expected text in the field 'answer', found half"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1: .* found UTF-16 text; save the file as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "line 1: .* found a zero byte; save the file as UTF-8"),
        ('{"prompt": "é"}'.encode("utf-16-be"), "line 1: .* found zero bytes, as in UTF-16 text .*; save the file"),
        (gzip.compress(PROMPT, mtime=0), "found a gzip file; unpack it with gunzip"),
        (b"PAR1\x15\x04", "found a Parquet file; write task.name: dataset"),
        (b"PK\x03\x04", "found a zip archive or a spreadsheet"),
        (b"version https://git-lfs.github.com/spec/v1\n", "found a pointer of Git LFS"),
        (b'[{"prompt": "a"},\n {"prompt": "b"}]', r"one JSON list as the whole file; .* jq -c '\.\[\]'"),
        (b'[{"prompt": "a"}]', "one JSON list as the whole file"),
        (b'{\n  "prompt": "a"\n}', "one JSON object as the whole file"),
        (b"prompt,answer\na,b\n", "line 1: expected one JSON object, .*; the line begins with 'prompt,answer'"),
        (PROMPT + b"null", "line 2: expected a JSON object, found null"),
        (PROMPT + b'"b"', "line 2: expected a JSON object, found text"),
        (
            b'{"prompt": 7}',
            "line 1: expected the prompt as text or as a list of messages in the field 'prompt', found int",
        ),
        (
            b'{"question": "a", "answer": "b"}',
            "found none in the fields question, answer; write args.promptField: question",
        ),
        (b'{"q": "a"}', "found none in the fields q; name the field with the prompt in args.promptField"),
        (b"{}", "found none in an object without fields"),
        (b'{"prompt": ["a"]}', r"found list .*; write text, or messages such as \[\{"),
        (b'{"prompt": []}', "found list"),
        (b'{"dialog": [{"role": "user", "content": "a"}]}', "name the field with the prompt in args.promptField"),
        (
            b'{"conversations": [{"from": "human", "value": "a"}]}',
            "found none in the fields conversations; write args.promptField: conversations",
        ),
        (b'{"prompt": [{"from": "human", "value": "a"}]}', "write role in place of from .user for human, .* of value"),
        (
            b'{"prompt": [{"role": "human", "content": "a"}]}',
            r"expected a role in prompt\[0\] \(system, developer, user, assistant, tool\), found 'human'",
        ),
        (b'{"messages": [{"content": "a"}]}', r"expected a role in messages\[0\] .*, found None"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}]}',
            r"expected text as content in prompt\[1\], found list .*images, audio and calls of tools are not supported",
        ),
        (b'{"prompt": [{"role": "user", "content": null}]}', r"as content in prompt\[0\], found NoneType"),
        (b'{"prompt": [{"role": "user", "content": "\\ud83d"}]}', r"in the field 'prompt\[0\].content', found half of"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "ends with a message of the user, assistant or tool, found one of the system; end it with the user's",
        ),
    ],
)
def test_an_unusable_file_is_refused_with_line_cause_and_remedy(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message) as raised:
        read(JsonlArgs(path="data.jsonl"), tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'data.jsonl'}")


def test_prompts_may_be_conversations(tmp_path: Path) -> None:
    user, reply = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    lines = [{"prompt": [user]}, {"messages": [user, reply, user | {"name": None}]}, {"prompt": "1+1", "messages": []}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read(JsonlArgs(path="data.jsonl"), tmp_path)
    assert [item.question for item in found] == [[user], [user, reply, user], "1+1"]
    assert found[1].record == lines[1], "the reward receives the line as it is"


def test_an_answer_may_be_within_an_object(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "reward_model": {"ground_truth": "4"}}, {"prompt": "b", "reward_model": "none"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read(JsonlArgs(path="data.jsonl", answer_field="reward_model.ground_truth"), tmp_path)
    assert [item.record.get("answer") for item in found] == ["4", None]


def test_a_named_answer_field_that_no_line_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a", "solution": "b"}\n{"prompt": "c"}\n')
    items = read(JsonlArgs(path="data.jsonl", answer_field="solution"), tmp_path)
    assert [item.record.get("answer") for item in items] == ["b", None]
    with pytest.raises(BadInput, match=r"'label' \(args\.answerField\) .*found none in any line, but 'prompt'"):
        read(JsonlArgs(path="data.jsonl", answer_field="label"), tmp_path)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_separator_within_a_string_does_not_end_the_line(separator: str, tmp_path: Path) -> None:
    prompt = f"Given f(x){separator}find x"
    text = json.dumps({"prompt": prompt}, ensure_ascii=False)
    (tmp_path / "prompts.jsonl").write_text(f"{text}\r\n{text}\n", encoding="utf-8", newline="")
    items = read(JsonlArgs(path="prompts.jsonl"), tmp_path)
    assert [item.question for item in items] == [prompt, prompt]


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf" + PROMPT, PROMPT.replace(b"\n", b"\r\n"), b'{"prompt": "a", "x": "\\ud83d"}']
)
def test_a_byte_order_mark_and_other_line_ends_are_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    assert [item.question for item in read(JsonlArgs(path="data.jsonl"), tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", "found none; correct the path"),
        ("folder", "found a directory; name a file"),
        ("fifo", "found a FIFO, socket or device; name a file"),
        ("/dev/null", "found a FIFO, socket or device"),
        ("a\0b", "cannot read the prompts in .*: embedded null byte; correct the path"),
        ("x" * 300, "cannot read the prompts in .*: File name too long"),
        ("loop", "cannot read the prompts in .*: Too many levels of symbolic links"),
        ("data.jsonl/more", "cannot read the prompts in .*: Not a directory"),
    ],
)
def test_a_path_without_a_readable_file_is_refused(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "data.jsonl").write_bytes(PROMPT)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadInput, match=f"^task.args.path: .*{message}"):
        read(JsonlArgs(path=path), tmp_path)


FUNCTIONS = """
import asyncio, itertools
class Silent:
    def __repr__(self):
        raise RuntimeError
class Angry(dict):
    def get(self, *_):
        raise SystemExit(3)
def deep(value):
    for _ in range(100_000):
        value = [value]
    return value
async def waits(count):
    await asyncio.sleep(0)
    return [{"prompt": str(n)} for n in range(count)]
async def stream():
    yield {"prompt": "a"}
def needs(path):
    return []
def items():
    BODY
"""


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "unusable_items.py").write_text(FUNCTIONS, encoding="utf-8")
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("unusable_items", None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("return {}['key']", r"raised KeyError: 'key' \(.*unusable_items\.py, line 21\)"),
        ("raise SystemExit('no data')", r"called sys\.exit\('no data'\)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        (r"yield {'prompt': 'a'}; raise OSError('\udcff gone')", r"raised OSError: \\udcff gone"),
        (
            "return ({'prompt': str(n)} for n in itertools.count())",
            "expected at most 1,000 items from the generator .*, found more; end it, or return a list",
        ),
        ("return 'prompts'", "expected a list of items .*, found str; return a list of dicts"),
        ("return {'prompt': 'a'}", "expected a list of items .*, found dict"),
        ("stream", "expected a list of items .*, found async_generator"),
        ("return [{'prompt': 'a'}, 7]", "expected item 1 of .* to be a dict with a 'prompt', found 7"),
        (
            r"return [{'prompt': 'a'}, {'prompt': '\ud83d'}]",
            "item 1 of .*: expected text in the field 'prompt', found half of a character",
        ),
        (
            "return [{'question': 'a', 'answer': 'b'}]",
            "item 0 of .*found none in the fields question, answer; return the prompt under the key 'prompt'",
        ),
        (
            "return [{'prompt': [{'role': 'me', 'content': 'a'}]}]",
            "item 0 of .*: expected a role in prompt.0. .*, found 'me'",
        ),
        (
            "return [{'prompt': 'a'}, {'prompt': 'b', 'check': lambda answer: True}]",
            "item 1 of .*: expected a record that can be pickled, .*; use numbers, strings, lists and dicts",
        ),
        (
            "return [{'prompt': 'a', 'x': deep(0)}]",
            "item 0 of .*: expected a record that can be .* raised RecursionError",
        ),
        ("return [Silent()]", "expected item 0 of .*, found an object of the type Silent"),
        ("return [Angry()]", r"item 0 of .* called sys\.exit\(3\)"),
        ("needs", "raised TypeError: .* missing 1 required positional argument: 'path'$"),
    ],
)
def test_unusable_items_of_a_function_are_refused_with_their_number(
    function: str, message: str, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.tasks.python_functions._MOST_GENERATED_ITEMS", 1000)
    (functions / "unusable_items.py").write_text(FUNCTIONS.replace("BODY", function), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        call_for_items(f"unusable_items:{'items' if ' ' in function else function}", {}, functions)


def test_a_function_may_return_conversations(functions: Path) -> None:
    text = FUNCTIONS.replace("BODY", "return [{'messages': [{'role': 'user', 'content': 'a'}]}]")
    (functions / "unusable_items.py").write_text(text, encoding="utf-8")
    [item] = call_for_items("unusable_items:items", {}, functions)
    assert item.question == [{"role": "user", "content": "a"}]


def test_a_function_of_items_may_be_async(functions: Path) -> None:
    items = call_for_items("unusable_items:waits", {"count": 2}, functions)
    assert [item.question for item in items] == ["0", "1"]


@pytest.mark.parametrize(
    "settings",
    [{"min_terms": "many"}, {"min_terms": [1]}, {"min_terms": 10**400}, {"seed": "\ud83d"}],
)
def test_unusable_settings_of_reasoning_gym_are_refused(settings: dict[str, Any]) -> None:
    args = ReasoningGymArgs.model_validate({"dataset": "chain_sum", **settings})
    with pytest.raises(BadInput, match="the reasoning-gym data set chain_sum"):
        ReasoningGymItems(args, seed=0)[0]
