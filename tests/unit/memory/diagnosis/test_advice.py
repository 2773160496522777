"""Advice names the options of the trainer that wrote the log; `texts.jsonl` has most cases."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_memory.diagnosis import FailureClass
from rljob_memory.programs import PROGRAMS, Effect
from tests.unit.memory.diagnosis.recorded import diagnoses_of, evidence_of, torch_message

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
