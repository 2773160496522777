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


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        (f"{MODEL}{TASK}  algorithm: {{}}\n", "spec.algorithm.steps", "required: Number of steps"),
        (f"{TASK}{ALGORITHM}", "spec.model", "required: The model to train."),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: 3, groupsize: 4}}\n",
            "spec.algorithm.groupsize",
            "unknown field; did you mean groupSize?",
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: 3, group_size: 4}}\n",
            "spec.algorithm.group_size",
            "unknown field; did you mean groupSize?",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  learningRate: 1.0e-5\n",
            "spec.learningRate",
            "unknown field here: write it as spec.algorithm.learningRate",
        ),
        (f"{MODEL}{TASK}{ALGORITHM}  name: digits\n", "spec.name", "unknown field here: write it as spec.task.name"),
        (
            f"{MODEL}{TASK}{ALGORITHM}  recovery: {{patience: 3}}\n",
            "spec.recovery.patience",
            "unknown field; the fields here are maxAdjustments, maxRestarts, phaseDeadlineSeconds",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  memory: {{kvCache: 10GB}}\n",
            "spec.memory.kvCache",
            'expected Auto or a quantity of bytes such as 512Mi or 4Gi, found "10GB"; write 10Gi or 10G',
        ),
        (
            f"  model: {{uri: Qwen/Qwen3-0.6B}}\n{TASK}{ALGORITHM}",
            "spec.model.uri",
            "expected a URI that begins with oci://, hf://, pvc://, file:// or random://, such as hf://org/name, "
            'found "Qwen/Qwen3-0.6B"; did you mean hf://Qwen/Qwen3-0.6B?',
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: three}}\n",
            "spec.algorithm.steps",
            'expected a whole number from 1 to 10000000, found "three"',
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: '3'}}\n",
            "spec.algorithm.steps",
            'expected a whole number from 1 to 10000000, found "3"; remove the quotes',
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: 3.5}}\n",
            "spec.algorithm.steps",
            "expected a whole number from 1 to 10000000, found 3.5",
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: true}}\n",
            "spec.algorithm.steps",
            "expected a whole number from 1 to 10000000, found true",
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: 3, groupSize: 1}}\n",
            "spec.algorithm.groupSize",
            "expected a whole number from 2 to 1024, found 1",
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: 3, clipLow: 1.0}}\n",
            "spec.algorithm.clipLow",
            "expected a number above 0 and below 1, found 1.0",
        ),
        (
            f"{MODEL}{TASK}  algorithm: {{steps: 3, learningRate: .nan}}\n",
            "spec.algorithm.learningRate",
            "expected a number above 0 and at most 1, found NaN",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  topology: colocated\n",
            "spec.topology",
            'expected Colocated or Disaggregated, found "colocated"; did you mean Colocated?',
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  memory: {{emptyCache: on}}\n",
            "spec.memory.emptyCache",
            "expected Auto, Enabled or Disabled, found true; write Enabled",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  memory: {{rolloutSleep: off}}\n",
            "spec.memory.rolloutSleep",
            "expected Auto, Disabled, Level1 or Level2, found false; write Disabled (YAML reads off and no as false)",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  memory: {{kvCache: 4GB}}\n",
            "spec.memory.kvCache",
            'expected Auto or a quantity of bytes such as 512Mi or 4Gi, found "4GB"',
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  memory: {{microBatchTokens: 0}}\n",
            "spec.memory.microBatchTokens",
            "expected Auto or a whole number of at least 1, found 0",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  controller: here\n",
            "spec.controller",
            'expected an object with the fields requireGpuFreeNode, template, found "here"',
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  trainer: {{image: mine, args: [--fast, 3]}}\n",
            "spec.trainer.args[1]",
            "expected a string of at most 4096 characters, found 3",
        ),
        (
            f"  model: {{uri: ./smollm2}}\n{TASK}{ALGORITHM}",
            "spec.model.uri",
            "expected a URI that begins with oci://, hf://, pvc://, file:// or random://",
        ),
        (
            f"{MODEL}  task: {{name: digit}}\n{ALGORITHM}",
            "spec.task.name",
            'expected digits, reasoning-gym, jsonl, or a Python function as module:function, found "digit"',
        ),
        (f"{MODEL}  task: {{name: jsonl, args: {{path: a}}}}\n{ALGORITHM}", "spec.task.reward", "required for this"),
        (
            f"{MODEL}  task: {{name: reasoning-gym}}\n{ALGORITHM}",
            "spec.task.args.dataset",
            "required: Name of a reasoning-gym data set",
        ),
        (
            f"{MODEL}  task: {{name: digits, args: {{size: 3}}}}\n{ALGORITHM}",
            "spec.task.args.size",
            "unknown field: remove it, since no fields are allowed here",
        ),
        (
            f"{MODEL}  task: {{name: jsonl, reward: 'r:f', args: {{path: a, prompt_field: q}}}}\n{ALGORITHM}",
            "spec.task.args.prompt_field",
            "unknown field; did you mean promptField?",
        ),
        (
            f"{MODEL}  task: {{name: digits, promptTemplate: 'Say it'}}\n{ALGORITHM}",
            "spec.task.promptTemplate",
            "expected a text that contains {question}",
        ),
        (
            f"{MODEL}  task: {{name: digits, answer: {{pattern: 'a(b'}}}}\n{ALGORITHM}",
            "spec.task.answer.pattern",
            "expected a Python regular expression",
        ),
        (
            f"{MODEL}  task: {{name: digits, answer: {{pattern: '[0-9]+'}}}}\n{ALGORITHM}",
            "spec.task.answer.pattern",
            "expected one group",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  rollout: {{engineArgs: {{tensor_parallel_size: 2}}}}\n",
            "spec.rollout.engineArgs",
            "must not set tensor_parallel_size (write spec.rollout.tensorParallelSize)",
        ),
        (
            f"{MODEL}{TASK}{ALGORITHM}  rollout: {{replicas: 2}}\n",
            "spec.rollout.replicas",
            "requires topology: Disaggregated",
        ),
    ],
)
def test_a_problem_names_its_field_and_a_valid_value(
    spec: str, path: str, message: str, problems_of: ProblemsOf
) -> None:
    problems = problems_of(f"{HEAD}spec:\n{spec}")
    assert [problem.path for problem in problems] == [path]
    assert problems[0].message.startswith(message)


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


def test_no_conflict_is_reported_for_an_invalid_field(problems_of: ProblemsOf) -> None:
    """The topology that fits the replicas depends on a valid topology."""
    problems = problems_of(f"{JOB}  topology: Separate\n  rollout: {{replicas: 2}}\n")
    assert [problem.path for problem in problems] == ["spec.topology"]


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
        (f"a: {'[' * 5000}", None, "is not YAML: found too many levels of nesting"),
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


def test_a_field_written_twice_is_a_problem(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(JOB.replace("{steps: 3}", "{steps: 3, steps: 4}"))
    assert problem.path == "spec.algorithm.steps"
    assert problem.message == "occurs twice, first in line 7, and YAML silently uses the last: remove one"


def test_a_broken_document_does_not_hide_the_problems_before_it(problems_of: ProblemsOf) -> None:
    invalid = JOB.replace("steps: 3", "steps: 0")
    problems = problems_of(f"{JOB}---\nkind: ConfigMap\napiVersion: v1\n---\n{invalid}---\na: *b\n")
    assert [(problem.document, problem.path) for problem in problems] == [(3, "spec.algorithm.steps"), (None, "")]


def test_fields_within_a_field_written_twice_are_not_repeated(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(JOB + ALGORITHM)
    assert (problem.path, problem.line) == ("spec.algorithm", 8)


def test_a_line_end_after_a_name_is_not_overlooked(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(JOB.replace("name: digits", 'name: "digits\\n"'))
    assert problem.path == "spec.task.name"


@pytest.mark.parametrize("name", ["Upper", "-dash", "dash-", "1st", "a.b", "a" * 49])
def test_a_name_that_pods_cannot_have_is_a_problem(name: str, problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(JOB.replace("name: job", f"name: {name}"))
    assert problem.path == "metadata.name"


def test_a_namespace_that_cannot_exist_is_a_problem(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(JOB.replace("name: job", "name: job, namespace: Foo"))
    assert (problem.path, problem.message.partition(",")[0]) == (
        "metadata.namespace",
        "expected a name of lower-case letters",
    )


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


def test_the_examples_are_valid() -> None:
    examples = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
    assert examples
    for path in examples:
        assert load_manifest(path).spec.algorithm.steps > 0
