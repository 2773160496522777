"""Text with half of a surrogate pair can be stored, and is refused in manifests."""

from __future__ import annotations

import json

import pytest
import yaml

from rljob_api.storable_text import is_storable, storable
from rljob_api.termination_message import TerminationMessage, read_termination_message
from rljob_api.yaml_document import read_documents


def test_lone_surrogates_anywhere_in_a_value_become_escapes() -> None:
    value = {"a\udcff": ["é😀", ("\ud83d", 7, None)]}
    assert storable(value) == {"a\\udcff": ["é😀", ("\\ud83d", 7, None)]}
    assert is_storable("é😀")
    assert not is_storable("a\ud83d")


def test_a_termination_message_may_quote_any_text() -> None:
    written = TerminationMessage(exit_code=84, message="found 'ab \ud83d c'").to_json()
    read = read_termination_message(written.decode("utf-8"))
    assert read is not None
    assert read.message == "found 'ab \\ud83d c'"
    assert json.loads(written)["exitCode"] == 84


def test_escapes_of_a_pair_in_yaml_are_one_character() -> None:
    [document] = read_documents('task: {systemPrompt: "\\ud83d\\ude00 é"}\n')
    assert document.data == {"task": {"systemPrompt": "😀 é"}}


def test_half_of_a_pair_in_yaml_is_refused_with_its_line() -> None:
    with pytest.raises(yaml.MarkedYAMLError, match="found half of a character in") as raised:
        list(read_documents('task:\n  promptTemplate: "{question} \\ud83d"\n'))
    assert raised.value.problem_mark is not None
    assert raised.value.problem_mark.line == 1
