"""Diagnoses of texts: the messages of programs in `texts.jsonl`, recorded failures and public threads.

A line of `texts.jsonl` has a `text` (or the `frames` of a failure on a full GPU), a remark (`about`), and what is
expected of it: the first `class` (null: no diagnosis), bounds of its confidence (`least`, `most`), the `kind`,
`activity`, `rank` and `sizes` of the failure, or just the `model`; parts of the `message` and the `advice`, and parts
that must not be advised (`not_advised`). A `quoted` text is part of the message, and a `reported` one counts as a
sentence about a shortage. One without a figure (`has_figure`) or tensors (`has_tensors`) is no line about memory.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import pytest

from rljob_api.memory_failure import MemoryFailure
from rljob_api.memory_plan import MemorySettings
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence.failure import FailureKind
from rljob_memory.evidence.figures import Measure, figures_of
from rljob_memory.evidence.model_facts import ModelFacts
from rljob_memory.evidence.shortage import reported_shortage
from rljob_memory.evidence.signatures import Signature, match_signature, signatures
from rljob_memory.programs import PROGRAMS, Effect
from tests.unit.memory.diagnosis.recorded import (
    SURE,
    diagnoses_of,
    evidence_of,
    json_lines,
    public_failures,
    recorded_evidence,
    recorded_failures,
    torch_message,
)

TEXTS = json_lines(Path(__file__).with_name("texts.jsonl"))
FIELDS = {
    *("about", "text", "frames", "class", "least", "most", "kind", "activity", "rank", "sizes", "model"),
    *("message", "advice", "not_advised", "quoted", "reported", "has_figure", "has_tensors"),
}
PREFIXES = ["", "(Worker pid=812, ip=10.0.0.4) ", "[rank3]: ", "2026-11-23 07:10:11,123 ERROR "]
RECORDED = recorded_failures()


def traceback_of(frames: list[str], *, process: float = 78.61) -> str:
    """A traceback, and a failure on a GPU of which the process holds this many GiB."""
    parts = [frame.partition(" in ") for frame in frames]
    stack = [f'  File "{file}", line 1, in {function}' for file, _, function in parts]
    message = torch_message(1.16, total=79.11, free=0.45, process=process, allocated=process - 4, cached=0.09)
    return "\n".join(["Traceback (most recent call last):", *stack, message])


def text_of(case: dict[str, Any]) -> str:
    return case["text"] if "text" in case else traceback_of(case["frames"])


def check(case: dict[str, Any], prefix: str = "") -> None:
    text = text_of(case)
    evidence = evidence_of(text if "\n" in text else f"start\n{prefix}{text}\nend\n")
    best = next(iter(diagnose(evidence)), None)
    if "model" in case:
        assert evidence.model == ModelFacts(**case["model"])
        return
    if case.get("class", "any") is None:
        assert best is None
        return
    failure = evidence.failure
    assert best is not None
    found = {
        "class": str(best.failure_class),
        "kind": failure.kind.name if failure else None,
        "activity": failure.activity.name if failure and failure.activity else None,
        "rank": failure.rank if failure else None,
        "sizes": dict(failure.sizes) if failure else {},
    }
    expected = {name: case[name] for name in found if name in case}
    assert {name: found[name] for name in expected} == expected
    assert case.get("least", 0) <= best.confidence <= case.get("most", 1)
    parts = [*case.get("message", []), *([text] if "quoted" in case else [])]
    assert [part for part in parts if part not in best.message] == []
    assert [part for part in case.get("advice", []) if part not in best.advice] == []
    assert [part for part in case.get("not_advised", []) if part in best.advice] == []


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: f"{case.get('about', '')}: {case.get('text', '')[:40]}")
def test_a_text_is_diagnosed_as_labelled(case: dict[str, Any]) -> None:
    assert case.keys() <= FIELDS
    check(case)
    text = text_of(case)
    assert case.get("reported") in (None, reported_shortage(text) is not None)
    figures = figures_of(text)
    assert not figures or "has_figure" not in case
    assert "has_tensors" not in case or Measure.TENSORS not in {figure.measure for figure in figures}


@pytest.mark.parametrize("entry", signatures(), ids=lambda entry: entry.example[:60])
def test_the_example_of_a_signature_fits_it_first(entry: Signature) -> None:
    match = match_signature(entry.example)
    assert match is not None
    assert match.signature is entry
    assert dict(match.sizes).items() >= entry.sizes.items()


def test_every_signature_names_its_source_and_known_reasons() -> None:
    names = {entry.name for entry in signatures() if entry.name}
    assert {name for entry in signatures() for name in entry.unless} <= names
    kinds = {entry.kind for entry in signatures()} - set(FailureKind)
    assert kinds == {"Consequence", "OtherReason", "NoShortage"}
    assert all(entry.source for entry in signatures())


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_does_not_hide_a_line(prefix: str) -> None:
    for case in TEXTS:
        if "\n" not in text_of(case) and case.keys() & {"kind", "quoted"}:
            check(case, prefix)


@pytest.mark.parametrize("activity", ["WEIGHT_SYNC", "MODEL_LOAD", "OPTIMIZER", "FORWARD"])
def test_other_memory_and_a_steady_climb_outweigh_the_stack(activity: str) -> None:
    frames = next(case["frames"] for case in TEXTS if "frames" in case and case["activity"] == activity)
    assert diagnoses_of(traceback_of(frames, process=28.61))[0].failure_class is FailureClass.FOREIGN_PROCESS
    growing = [f"step {step} allocated: {20 + 4.5 * step:.2f} GiB, reserved: 78.00 GiB" for step in range(12)]
    best, *others = diagnoses_of(*growing, traceback_of(frames))
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert all(diagnosis.confidence <= 0.5 for diagnosis in others)


@pytest.mark.parametrize("excerpt", public_failures(), ids=lambda excerpt: f"{excerpt['set']}/{excerpt['name']}")
def test_the_first_diagnosis_of_a_thread_is_as_labelled(excerpt: dict[str, Any]) -> None:
    """The label of a known miss is the class that is diagnosed today."""
    best = next(iter(diagnoses_of(excerpt["text"])), None)
    expected = [excerpt["miss"]] if "miss" in excerpt else excerpt["label"] or [None]
    assert (str(best.failure_class) if best else None) in expected
    assert not (best and "miss" in excerpt and best.confidence > SURE)


@pytest.mark.parametrize(("expected", "path"), RECORDED, ids=[f"{cls}-{path.stem}" for cls, path in RECORDED])
def test_the_recorded_class_comes_first_and_no_other_is_sure(expected: FailureClass, path: PurePath) -> None:
    diagnoses = diagnose(recorded_evidence(path))
    assert [str(each.failure_class) for each in diagnoses][:1] == [str(expected)]
    assert {each.failure_class for each in diagnoses if each.confidence > SURE} <= {expected}


@pytest.mark.parametrize(("expected", "path"), RECORDED, ids=[f"{cls}-{path.stem}" for cls, path in RECORDED])
def test_a_recorded_class_does_not_depend_on_the_text(expected: FailureClass, path: PurePath) -> None:
    """The account of the failure, as JSON and without a message, has all that its diagnosis needs."""
    evidence = recorded_evidence(path)
    assert evidence.failure is not None
    names = MemoryFailure.model_fields
    account = MemoryFailure(**{name: getattr(evidence.failure, name) for name in names if name != "text"})
    again = MemoryFailure.model_validate_json(account.model_dump_json(by_alias=True, exclude_none=True))
    values = {name: getattr(again, name) for name in names}
    diagnoses = diagnose(replace(evidence, failure=evidence.failure.changed(**values)))
    assert [str(each.failure_class) for each in diagnoses][:1] == [str(expected)]


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
    without_engine = {"nemo-automodel", "llamafactory", "megatron-swift", "transformers", "tx"}
    assert {key for key, program in PROGRAMS.items() if not program.option(Effect.SHARE)} == without_engine


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
    assert {option.leaf for option in PROGRAMS[program].options if option.before is None} <= known
