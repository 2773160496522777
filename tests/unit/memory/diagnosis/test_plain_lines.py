"""Lines as a program printed them, out of JSON, HTML, escapes and terminals that broke them."""

from __future__ import annotations

import json
from io import BytesIO

import pytest

from rljob_memory.evidence.plain_lines import plain_lines

FRAME = '  File "/env/site-packages/torch/optim/adamw.py", line 606, in _multi_tensor_adamw'


def lines_of(text: str) -> list[str]:
    return [line.decode().rstrip("\r\n") for line in plain_lines(BytesIO(text.encode()))]


def test_other_lines_are_left_as_they_are() -> None:
    text = "step 1\n  indented\ta < b && c > d\r\nno end"
    assert b"".join(plain_lines(BytesIO(text.encode()))) == text.encode()


def test_the_lines_of_a_message_in_json_follow_its_time() -> None:
    line = json.dumps({"time": "2026-03-04T10:11:12Z", "level": "ERROR", "message": "first\nsecond"})
    assert lines_of(line) == ["2026-03-04T10:11:12Z first", "2026-03-04T10:11:12Z second"]


@pytest.mark.parametrize(
    "line",
    [
        '{"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "x"}}}',
        '{"event": "step", "step": 3, "allocated_gb": 12.3}',
        '{"step": 3, "loss": 0.5}',
        '{"message": ["a", "list"]}',
        '{"message": "torn',
    ],
)
def test_json_whose_fields_are_the_content_stays(line: str) -> None:
    assert lines_of(line) == [line]


def test_escaped_line_ends_are_line_ends() -> None:
    repeated = json.dumps(f"Traceback (most recent call last):\n{FRAME}\n    func(\nValueError: x")
    assert lines_of(repeated)[1:3] == [FRAME, "    func("]
    path = r"C:\new\nets\train.py and C:\new\notes"
    assert lines_of(path) == [path]


def test_tags_and_entities_of_a_page_are_removed() -> None:
    page = '<span class="err">File &quot;/a.py&quot;, line 3, in step</span><br>'
    assert lines_of(page) == ['File "/a.py", line 3, in step']
    assert lines_of("cell <torch.Tensor> at <module>") == ["cell <torch.Tensor> at <module>"]


def test_half_of_a_character_in_json_becomes_an_escape() -> None:
    assert lines_of('{"level": "ERROR", "message": "CUDA out of memory \\ud83d"}') == ["CUDA out of memory \\ud83d"]


@pytest.mark.parametrize("width", range(12, FRAME.index("in _"), 5))
def test_a_broken_frame_is_one_line(width: int) -> None:
    broken = FRAME[:width].rstrip() + "\n" + FRAME[width:]
    first, *rest = lines_of(f"{broken}\n    func(")
    assert "".join(first.split()) == "".join(FRAME.split())
    assert rest == ["    func("]


def test_a_frame_that_is_cut_takes_no_other_line() -> None:
    assert lines_of('  File "/env/lib/pyth\nstep 3\nstep 4\nstep 5') == [
        '  File "/env/lib/pyth',
        *("step 3", "step 4", "step 5"),
    ]


def test_frames_in_one_line_are_lines_with_their_code() -> None:
    joined = (
        'Traceback: File "/a.py", line 1, in main run() File "/b.py", line 2, in step opt.step() RuntimeError: full'
    )
    assert lines_of(joined)[1:] == [
        *('  File "/a.py", line 1, in main', "    run() "),
        *('  File "/b.py", line 2, in step', "    opt.step()", "RuntimeError: full"),
    ]
