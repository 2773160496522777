"""`rljob validate`: checks manifests, and prints each finding with its line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob, RLJobSpec
from rljob_api.manifest import ManifestDocument, ManifestError, Problem, decoded, read_manifest, read_text
from rljob_api.manifest.problems import Checked
from rljob_api.manifest.unread_fields import unread_fields
from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_client.validation.suspicious_values import FieldFinding, memory_findings, suspicious_values
from rljob_memory.model_shape import compute_bytes, shape_in_uri

_STDIN = "-"


@dataclass(slots=True)
class Validation:
    """Checks manifests, prints the findings, and remembers the worst."""

    schema_only: bool = False
    """Check the schema only."""

    strict: bool = False
    """Warnings are errors."""

    settings: Sequence[str] = ()
    """Fields that are set in each RLJob, as `path=value`."""

    as_json: bool = False
    """Print a JSON object with all findings, at the end."""

    quiet: bool = False
    """Print errors and warnings only."""

    found: list[Problem] = field(default_factory=list)
    """All findings, in their order."""

    invalid: bool = False
    """A manifest is invalid, or has a warning that counts as an error."""

    unusable: bool = False
    """A job would fail, although its manifest is valid."""

    def check(self, manifests: Sequence[str]) -> ExitCode:
        """Check all manifests. `-` is standard input."""
        for manifest in manifests:
            self._check_file(manifest)
        code = ExitCode.INVALID_MANIFEST if self.invalid else ExitCode.BAD_INPUT if self.unusable else ExitCode.COMPLETE
        if self.as_json:
            findings = [{**asdict(problem), "file": str(problem.file)} for problem in self.found]
            print(json.dumps({"valid": code == ExitCode.COMPLETE, "findings": findings}, indent=2, ensure_ascii=False))
        return code

    def _check_file(self, manifest: str) -> None:
        path = Path("stdin") if manifest == _STDIN else Path(manifest)
        directory = Path.cwd() if manifest == _STDIN else path.parent
        try:
            text = decoded(path, sys.stdin.buffer.read()) if manifest == _STDIN else read_text(path)
            documents = read_manifest(path, text)
        except ManifestError as error:
            self._refuse(error.problems)
            return
        for document in documents:
            if kind := document.other_kind:
                self._note(f"{_place(document)}: skipped: {kind}")
            else:
                self._check_document(document, directory)
        if all(document.other_kind for document in documents):
            self._refuse([Problem(path, "", "expected an RLJob, found other kinds of objects only")])

    def _check_document(self, document: ManifestDocument, directory: Path) -> None:
        try:
            document = document.with_settings(self.settings)
            job = document.load()
        except ManifestError as error:
            self._refuse(error.problems)
            if error.checked is not None and not self.schema_only:
                for finding in _other_errors(error.checked, directory):
                    self._show(finding, document)
            return
        findings: list[FieldFinding] = []
        if not self.schema_only:
            data = document.document.data
            unread = [FieldFinding(*each) for each in unread_fields(job.spec, data["spec"])]
            found = [*suspicious_values(job, data), *unread, *inspect_job(job, directory)]
            findings = list(dict.fromkeys(found))
        for finding in findings:
            self._show(finding, document)
        if not any(finding.severity == "error" for finding in findings):
            warnings = sum(finding.severity == "warning" for finding in findings)
            counted = f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
            self._note(f"{_place(document)}: valid{counted}")

    def _show(self, finding: FieldFinding, document: ManifestDocument) -> None:
        self._add(document.problem(finding.field, finding.message, finding.severity))
        self.unusable |= finding.severity == "error"
        self.invalid |= self.strict and finding.severity == "warning"

    def _refuse(self, problems: Sequence[Problem]) -> None:
        self.invalid = True
        for problem in problems:
            self._add(problem)

    def _add(self, problem: Problem) -> None:
        self.found.append(problem)
        if problem.severity == "note":
            self._note(str(problem))
        elif not self.as_json:
            print(problem, file=sys.stderr)

    def _note(self, text: str) -> None:
        if not self.quiet and not self.as_json:
            print(text)


def _other_errors(checked: Checked, directory: Path) -> Iterator[FieldFinding]:
    """Errors of the job that have nothing to do with its invalid fields."""
    replaced = {path[:2] for path in checked.replaced}
    model, task, trainer = (("spec", name) in replaced for name in ("model", "task", "trainer"))
    if trainer or ("spec",) in checked.replaced or (model and task):
        return
    for finding in inspect_job(checked.job, directory):
        of_task = finding.field[:2] == ("spec", "task")
        depends = (of_task and task) or (not of_task and model) or (task and finding.field[-1] in _PROMPT_FIELDS)
        if finding.severity == "error" and not depends and not _touches(finding.field, checked.replaced):
            yield finding


_PROMPT_FIELDS = ("maxPromptTokens", "maxStaleness")


def _touches(field: FieldPath, paths: frozenset[FieldPath]) -> bool:
    """True if `field` is at, around or within one of the `paths`."""
    return any(field[: len(path)] == path or path[: len(field)] == field for path in paths)


def _place(document: ManifestDocument) -> str:
    return f"{document.file} (document {document.number})" if document.number else str(document.file)


TIMEOUT_SECONDS = 120.0
"""A task with many prompts takes 20 s, a download of a tokenizer seconds."""


def inspect_job(job: RLJob, directory: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> list[FieldFinding]:
    """The findings about model, data set, reward function and engine arguments.

    `directory`: that of the task's files and Python modules.
    """
    spec = job.spec
    if spec.trainer is not None:
        return [
            FieldFinding("note", ("spec", "trainer"), "another trainer reads model, task and engineArgs: not checked")
        ]
    if find_spec("rljob_trainer") is None:
        return list(_without_trainer(spec))
    text = job.model_dump_json(by_alias=True, exclude_none=True)
    with tempfile.TemporaryDirectory() as folder:
        results, errors = Path(folder) / "results.jsonl", Path(folder) / "errors.txt"
        command = [sys.executable, "-P", "-m", "rljob_trainer.inspection", str(directory.absolute()), str(results)]
        with errors.open("wb") as stream:
            try:
                finished = subprocess.run(
                    command, input=text.encode(), stdout=stream, stderr=stream, timeout=timeout_seconds, check=False
                )
            except subprocess.TimeoutExpired:
                return findings_in(results, f"takes longer than {timeout_seconds:g} s: not checked")
        if finished.returncode == 0:
            return findings_in(results)
        printed = errors.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(printed) if line.strip()), "it printed nothing")
        return findings_in(results, f"ended the process of the check with {_end(finished.returncode)}: {last:.300}")


def _without_trainer(spec: RLJobSpec) -> Iterator[FieldFinding]:
    """A note, and the prediction for the size of the model in its URI."""
    yield FieldFinding(
        "note", ("spec",), "rljob-trainer is not installed here: model, task and engineArgs are not checked"
    )
    device: Literal["cpu", "cuda"] = "cuda" if spec.policy.gpus_per_replica else "cpu"
    shape = shape_in_uri(spec, compute_bytes(spec, device))
    if shape is not None:
        yield from memory_findings(spec, shape, device)


def _end(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"the signal {signal.Signals(-returncode).name}"


def findings_in(results: Path, interrupted: str | None = None) -> list[FieldFinding]:
    """The findings in the file of an inspection. `interrupted`: message about the check that began last."""
    entries: Sequence[dict[str, Any]] = []
    if results.exists():
        entries = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    found = [
        FieldFinding(entry["severity"], tuple(entry["field"]), entry["message"])
        for entry in entries
        if "severity" in entry
    ]
    if interrupted is not None:
        last = next((entry for entry in reversed(entries) if "check" in entry), {"check": "the job", "field": ["spec"]})
        found.append(FieldFinding("error", tuple(last["field"]), f"{last['check']} {interrupted}"))
    return found
