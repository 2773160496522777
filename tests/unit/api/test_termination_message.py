"""Termination messages fit the kubelet's limit and survive a round trip."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.bounds import is_storable, storable
from rljob_api.manifest.yaml_document import read_documents
from rljob_api.step_report import Evidence
from rljob_api.termination_message import (
    MAX_TERMINATION_MESSAGE_BYTES,
    TerminationMessage,
    read_termination_message,
)


def evidence(message: str) -> Evidence:
    return Evidence(
        time=datetime(2026, 1, 2, tzinfo=UTC), attempt=1, role="policy", rank=3, step=7, phase="update", message=message
    )


@settings(deadline=None)
@given(text=st.text(max_size=3000), message=st.none() | st.text(max_size=4096))
def test_any_message_fits_and_survives_a_round_trip(text: str, message: str | None) -> None:
    written = TerminationMessage(
        exit_code=80, message=text, step=6, evidence=None if message is None else evidence(message)
    ).to_json()
    assert len(written) <= MAX_TERMINATION_MESSAGE_BYTES
    read = read_termination_message(written.decode())
    assert read is not None
    assert (read.exit_code, read.step) == (80, 6)
    if read.evidence is not None:
        assert message is not None
        assert message.startswith(read.evidence.message)
        assert (read.evidence.role, read.evidence.rank, read.evidence.step) == ("policy", 3, 7)


@pytest.mark.parametrize("character", ["x", "\x00", "€", "🙂"])
def test_the_longest_texts_fit_and_are_kept_as_far_as_possible(character: str) -> None:
    message = TerminationMessage(exit_code=80, message=character * 5000, evidence=evidence(character * 4096))
    assert len(message.to_json()) <= MAX_TERMINATION_MESSAGE_BYTES
    assert len(message.message) == 1024
    assert message.message.endswith(f"{character}…")
    written = TerminationMessage(exit_code=80, message="a GPU ran out of memory", evidence=evidence("x" * 4096))
    read = read_termination_message(written.to_json().decode())
    assert read is not None
    assert read.evidence is not None
    assert len(read.evidence.message) > 3500


@pytest.mark.parametrize("text", ["", "Killed", "{}", '{"exitCode": 80', '{"exitCode": 300, "message": ""}', "[1]"])
def test_text_that_is_not_a_message_gives_none(text: str) -> None:
    assert read_termination_message(text) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"time": "2026-01-02T00:00:00"},
        {"step": 99999999999999999999},
        {"diagnoses": [{"class": "Unknown", "confidence": 0.5, "message": "", "numbers": {"requested_bytes": 10**30}}]},
    ],
    ids=["a time without a zone", "a step beyond 64 bits", "a number beyond 64 bits"],
)
def test_a_message_that_does_not_fit_a_status_gives_none(broken: dict[str, object]) -> None:
    good = evidence("CUDA out of memory").model_dump(mode="json", by_alias=True, exclude_none=True)
    message = {"exitCode": 80, "message": "a GPU ran out of memory", "evidence": good}
    assert read_termination_message(json.dumps(message)) is not None
    assert read_termination_message(json.dumps(message | {"evidence": good | broken})) is None


# --- half of a surrogate pair can be stored as an escape, and is refused in manifests ---


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
