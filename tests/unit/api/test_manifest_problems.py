"""All problems of a manifest are reported at once, each with its place, the value found and a valid value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api.job import RLJob
from rljob_api.manifest import ManifestError, Problem, load_manifest

ProblemsOf = Callable[[str], list[Problem]]

HEAD = "apiVersion: rljob.dev/v1alpha1\nkind: RLJob\nmetadata: {name: job}\n"
MODEL = "  model: {uri: 'hf://org/name'}\n"
TASK = "  task: {name: digits}\n"
ALGORITHM = "  algorithm: {steps: 3}\n"
JOB = f"{HEAD}spec:\n{MODEL}{TASK}{ALGORITHM}"


def test_all_problems_are_reported_at_once_with_their_lines(problems_of: ProblemsOf) -> None:
    problems = problems_of(
        HEAD
        + """\
spec:
  model: {uri: nowhere}
  task:
    name: reasoning-gym
    answer: {pattern: "(a)(b)"}
  algorithm:
    stps: 3
    groupSize: 1
    dualClip: 0.5
  rollout:
    engineArgs: {model: other}
    replicas: 2
  queueName: gpus
  gang: Volcano
"""
    )
    assert [(problem.line, problem.path) for problem in problems] == [
        (5, "spec.model.uri"),
        (6, "spec.task.args.dataset"),
        (8, "spec.task.answer.pattern"),
        (9, "spec.algorithm.steps"),
        (10, "spec.algorithm.stps"),
        (11, "spec.algorithm.groupSize"),
        (12, "spec.algorithm.dualClip"),
        (14, "spec.rollout.engineArgs"),
        (15, "spec.rollout.replicas"),
        (17, "spec.gang"),
    ]


def test_a_problem_prints_as_file_line_path_and_message(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(f"{JOB}  suspended: true\n")
    assert str(problem) == f"{problem.file}:8: spec.suspended: unknown field; did you mean suspend?"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "expected an RLJob, found an empty file"),
        ("---\n# nothing\n---\n", None, "expected an RLJob, found an empty file"),
        ("a: &a [*a]\n", 1, "is not YAML: found an alias that contains itself"),
        ("- a\n", 1, "expected an RLJob with apiVersion, kind, metadata and spec, found a list: remove the dash"),
        ("a\n", 1, "expected an RLJob with apiVersion, kind, metadata and spec, found the text 'a'"),
        (f"{JOB}---\n{JOB}", 9, "expected one RLJob, found 2 of them"),
        ("kind:\u00a0RLJob\n", 1, "expected an RLJob with apiVersion, kind, metadata and spec, found the text"),
        (JOB + JOB, 8, "a second object begins here: write a line --- before it"),
        (f"a: {'[' * 1500}", None, "is not YAML: found too many levels of nesting"),
    ],
)
def test_text_that_is_not_a_manifest_is_refused_in_one_sentence(
    text: str, line: int | None, message: str, problems_of: ProblemsOf
) -> None:
    (problem,) = problems_of(text)
    assert (problem.path, problem.line) == ("", line)
    assert problem.message.startswith(message)


def test_another_kind_gets_one_message_and_no_list_of_fields(problems_of: ProblemsOf) -> None:
    problems = problems_of("apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\nspec: {template: {}}\n")
    assert [(problem.path, problem.line) for problem in problems] == [("apiVersion", 1), ("kind", 2)]
    assert problems[1].message == "expected RLJob, found 'Job'; write kind: RLJob"
    (listed,) = problems_of("apiVersion: v1\nkind: List\nitems: []\n")
    assert listed.message == "expected RLJob, found List: write each of its items as a document, after ---"


@pytest.mark.parametrize("head", ["", "apiVersion: rljob.dev/v1\nkind: RLJob\n", "kind: rljob\n"])
def test_a_wrong_version_or_kind_hides_no_other_problem(head: str, problems_of: ProblemsOf) -> None:
    problems = problems_of(f"{head}metadata: {{name: job}}\nspec:\n{MODEL}{TASK}  algorithm: {{steps: no}}\n")
    assert problems[-1].path == "spec.algorithm.steps"
    assert {problem.path for problem in problems[:-1]} <= {"apiVersion", "kind"}


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        (JOB.replace(MODEL, ""), "spec.model", 4, "required: The model to train."),
        (
            JOB.replace("{steps: 3}", "{steps: 3, steps: 4}"),
            "spec.algorithm.steps",
            7,
            "occurs twice, first in line 7, and YAML silently uses the last: remove one",
        ),
        (JOB + ALGORITHM, "spec.algorithm", 8, "occurs twice"),
        (JOB.replace("name: digits", 'name: "digits\\n"'), "spec.task.name", 6, "expected digits"),
        *[
            (JOB.replace("name: job", f"name: {name}"), "metadata.name", 3, "expected a name of")
            for name in ("Upper", "-dash", "dash-", "1st", "a.b", "a" * 49)
        ],
        (
            JOB.replace("name: job", "name: job, namespace: Foo"),
            "metadata.namespace",
            3,
            "expected a name of lower-case letters",
        ),
        # the topology that fits the replicas depends on a valid topology: only that is reported
        (f"{JOB}  topology: Separate\n  rollout: {{replicas: 2}}\n", "spec.topology", 8, "expected Colocated or"),
    ],
)
def test_one_mistake_is_one_problem(text: str, path: str, line: int, message: str, problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(text)
    assert (problem.path, problem.line) == (path, line)
    assert problem.message.startswith(message)


def test_a_broken_document_does_not_hide_the_problems_before_it(problems_of: ProblemsOf) -> None:
    invalid = JOB.replace("steps: 3", "steps: 0")
    problems = problems_of(f"{JOB}---\nkind: ConfigMap\napiVersion: v1\n---\n{invalid}---\na: *b\n")
    assert [(problem.document, problem.path) for problem in problems] == [(3, "spec.algorithm.steps"), (None, "")]


def test_an_unreadable_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("kind: Größe".encode("latin-1"))
    utf16 = tmp_path / "utf16.yaml"
    utf16.write_text(JOB, encoding="utf-16")
    for path, message in [
        (tmp_path / "absent.yaml", "found no such file"),
        (tmp_path, "found a directory"),
        (latin, "expected UTF-8 text, found byte 0xf6 at offset 8: save the file as UTF-8"),
        (utf16, "expected UTF-8 text, found UTF-16: save the file as UTF-8"),
    ]:
        with pytest.raises(ManifestError, match=message):
            load_manifest(path)


def test_numbers_and_strings_are_read_as_kubectl_reads_them(load: Callable[[str], RLJob]) -> None:
    """YAML 1.1 as PyYAML has it takes 2e-5 for a string and 2026-01-01 for a date."""
    text = JOB.replace("{steps: 3}", "{steps: 3, learningRate: 2e-5}").replace(
        "metadata: {name: job}", "metadata: {name: job, labels: {on: 2026-01-01}}"
    )
    job = load(text.replace("{on:", "{'on':"))
    assert job.spec.algorithm.learning_rate == 2e-5
    assert job.metadata.labels == {"on": "2026-01-01"}


def test_json_a_byte_order_mark_and_anchors_are_fine(load: Callable[[str], RLJob]) -> None:
    assert load("\ufeff" + JOB).spec.algorithm.steps == 3
    assert load(JOB.replace("\n", "\r\n")).spec.algorithm.steps == 3
    job = load(JOB).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert load(json.dumps(job, indent="\t")).spec.algorithm.steps == 3
    assert load(JOB.replace("{steps: 3}", "{<<: {groupSize: 4}, steps: 3}")).spec.algorithm.group_size == 4
    anchored = JOB.replace("{steps: 3}", "&a {steps: 3}") + "  policy: {template: {spec: {x: *a}}}\n"
    assert load(anchored).spec.policy.template.spec == {"x": {"steps": 3}}


def test_free_form_parts_keep_all_values(load: Callable[[str], RLJob]) -> None:
    job = load(
        f"{HEAD}spec:\n{MODEL}{ALGORITHM}  task: {{name: reasoning-gym, args: {{dataset: chain_sum, max_terms: 2}}}}\n"
        "  rollout: {engineArgs: {enforce_eager: true, 1: null}}\n"
    )
    assert job.spec.task.args == {"dataset": "chain_sum", "max_terms": 2}
    assert job.spec.rollout.engine_args == {"enforce_eager": True, "1": None}
