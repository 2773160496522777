"""Diagnoses of texts: the messages of programs in `texts.jsonl`, recorded failures and public threads.

A line of `texts.jsonl` has a `text`, a remark (`about`), and what is expected of it: the first `class` (null: no
diagnosis), bounds of its confidence (`least`, `most`), the `kind` and the `activity` of the failure, parts of the
`message` and the `advice`, and parts that must not be `advised`. A `quoted` text is part of the message; one that is
`reported` counts as a sentence about a shortage.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.mentions import reported_shortage
from rljob_memory.programs import PROGRAMS, Effect
from tests.unit.memory.diagnosis.recorded import (
    SURE,
    PublicFailure,
    diagnoses_of,
    evidence_of,
    public_failures,
    recorded_evidence,
    recorded_failures,
    torch_message,
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


# --- advice: the options of the program that wrote the log ---

OUT_OF_MEMORY = torch_message(9.27, total=139.8, free=3.02, process=136.78, allocated=133, cached=0.4)
PAGE = Path(__file__).parents[4] / "docs" / "diagnose.md"


def test_two_values_of_an_option_are_no_present_value() -> None:
    log = f"'gpu_memory_utilization': 0.85,\ngpu_memory_utilization=0.3\n{OUT_OF_MEMORY}"
    assert "gpu_memory_utilization" not in evidence_of(log).option_values


def test_an_unrecognized_log_gets_the_general_advice() -> None:
    found = diagnoses_of(OUT_OF_MEMORY)[0]
    assert found.advice == found.failure_class.general_advice


@pytest.mark.parametrize(
    "line",
    [
        '  File "/opt/rljob/lib/python3.12/site-packages/rljob_trainer/policy/rank.py", line 80, in update',
        "rljob 2026-11-27T10:00:00.000000Z update begins",
        "warning: OutOfMemory: policy rank 0, in the update of step 3",
    ],
)
def test_a_log_of_rljob_gets_the_fields_of_an_rljob(line: str) -> None:
    found = diagnoses_of("Traceback (most recent call last):", line, OUT_OF_MEMORY)[0]
    assert found.advice == found.failure_class.advice


def test_general_advice_names_no_field_of_an_rljob() -> None:
    field = re.compile(r"(?<![\w.])(?:spec|memory|recovery|policy)\.[a-z]|RLJob")
    assert [cause for cause in FailureClass if field.search(cause.general_advice)] == []


def test_the_advice_names_existing_settings() -> None:
    named = {name for cause in FailureClass for name in re.findall(r"\bmemory\.(\w+)", cause.advice)}
    fields = MemorySettings.model_fields
    assert named - {"_dump_snapshot"} <= {field.alias for field in fields.values()} | set(fields)


def test_the_page_about_diagnoses_has_every_class_and_its_advice() -> None:
    documented = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `[A-Z]\w+` \|", line)]
    assert documented == [f"| `{cause}` | {cause.meaning} | {cause.advice} |" for cause in FailureClass]


def test_every_program_has_an_option_for_its_engine() -> None:
    assert [key for key, program in PROGRAMS.items() if not program.option(Effect.SHARE)] == []


@pytest.mark.parametrize(
    ("program", "files"),
    [
        ("vllm", {"vllm": ["engine/arg_utils.py"]}),
        (
            "trl",
            {
                "trl": ["trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"],
                "transformers": ["training_args.py"],
            },
        ),
    ],
)
def test_the_options_of_a_program_exist(program: str, files: dict[str, list[str]]) -> None:
    known = set[str]()
    for package, names in files.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        for name in names:  # read, since an import takes long
            nodes = ast.walk(ast.parse((Path(spec.origin).parent / name).read_text(encoding="utf-8")))
            fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
            known |= {field.id for field in fields if isinstance(field, ast.Name)}
    assert PROGRAMS[program].leaves <= known
