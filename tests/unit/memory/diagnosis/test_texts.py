"""Diagnoses of texts: the messages of programs in `texts.jsonl`, recorded failures and public threads.

A line of `texts.jsonl` has a `text`, a remark (`about`), and what is expected of it: the first `class` (null: no
diagnosis), bounds of its confidence (`least`, `most`), the `kind` and the `activity` of the failure, parts of the
`message` and the `advice`, and parts that must not be `advised`. A `quoted` text is part of the message; one that is
`reported` counts as a sentence about a shortage.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.mentions import reported_shortage
from tests.unit.memory.diagnosis.recorded import (
    SURE,
    PublicFailure,
    diagnoses_of,
    evidence_of,
    public_failures,
    recorded_evidence,
    recorded_failures,
)

TEXTS = [json.loads(line) for line in Path(__file__).with_name("texts.jsonl").read_text(encoding="utf-8").splitlines()]
PREFIXES = ["", "(Worker pid=812, ip=10.0.0.4) ", "[rank3]: ", "2026-11-23 07:10:11,123 ERROR "]
RECORDED = recorded_failures()


def name_of(case: dict[str, Any]) -> str:
    """The remark and the beginning of the text."""
    return f"{case.get('about', '')}: {case['text'][:40]}"


def check(case: dict[str, Any], prefix: str = "") -> None:
    text = case["text"]
    evidence = evidence_of(text if "\n" in text else f"start\n{prefix}{text}\nend\n")
    best = next(iter(diagnose(evidence)), None)
    if case.get("class", "any") is None:
        assert best is None
        return
    failure = evidence.failure
    assert best is not None
    found = {
        "class": str(best.failure_class),
        "kind": failure.kind.name if failure else None,
        "activity": failure.activity.name if failure and failure.activity else None,
    }
    assert found | case == case | found
    assert case.get("least", 0) <= best.confidence <= case.get("most", 1)
    parts = [*case.get("message", []), *([text] if "quoted" in case else [])]
    assert [part for part in parts if part not in best.message] == []
    assert [part for part in case.get("advice", []) if part not in best.advice] == []
    assert [part for part in case.get("not_advised", []) if part in best.advice] == []


@pytest.mark.parametrize("case", TEXTS, ids=name_of)
def test_a_text_is_diagnosed_as_labelled(case: dict[str, Any]) -> None:
    check(case)
    assert case.get("reported") in (None, reported_shortage(case["text"]) is not None)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_does_not_hide_a_line(prefix: str) -> None:
    for case in TEXTS:
        if "\n" not in case["text"] and case.keys() & {"kind", "quoted"}:
            check(case, prefix)


@pytest.mark.parametrize("failure", public_failures(), ids=lambda failure: failure.name)
def test_the_first_diagnosis_of_a_thread_is_as_labelled(failure: PublicFailure) -> None:
    best = next(iter(diagnoses_of(failure.text)), None)
    assert (str(best.failure_class) if best else None) in failure.expected
    assert not (best and failure.is_miss and best.confidence > SURE)


@pytest.mark.parametrize(("expected", "path"), RECORDED, ids=[f"{cls}-{path.stem}" for cls, path in RECORDED])
def test_the_recorded_class_comes_first_and_no_other_is_sure(expected: FailureClass, path: Path) -> None:
    diagnoses = diagnose(recorded_evidence(path))
    assert [str(each.failure_class) for each in diagnoses][:1] == [str(expected)]
    assert {each.failure_class for each in diagnoses if each.confidence > SURE} <= {expected}


def test_each_class_has_at_least_two_recorded_failures() -> None:
    counts = Counter(expected for expected, _ in RECORDED)
    assert {failure_class for failure_class in FailureClass if counts[failure_class] < 2} == set()
