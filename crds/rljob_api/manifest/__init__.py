"""Manifests: the RLJob in a file, or all problems of the file, each with its line and its correction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

from rljob_api.job import RLJob
from rljob_api.manifest.problems import Checked, ProblemText, checked, is_number
from rljob_api.manifest.settings import SettingError, setting_of, with_settings
from rljob_api.manifest.yaml_document import Document, explain, read_documents
from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_api.metadata import API_VERSION

_LARGEST_MANIFEST_BYTES = 2 << 20
"""More than etcd stores of one object."""

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a manifest."""

    file: Path
    """The manifest."""
    path: str
    """Dotted path of the field; empty for the file itself."""
    message: str
    """Explanation of the problem, with its correction."""
    line: int | None = None
    """Line of the field, from 1."""
    document: int | None = None
    """Number of the document, from 1, in a file with several documents."""
    severity: Severity = "error"
    setting: str | None = None
    """Option --set of the command line that has set the field; None: the manifest has."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else str(self.file)
        if self.setting is not None:
            place = f"--set {self.setting}"
        document = f" (document {self.document})" if self.document else ""
        severity = "" if self.severity == "error" else f"{self.severity}: "
        path = f"{self.path}: " if self.path else ""
        return f"{place}{document}: {severity}{path}{self.message}"


class ManifestError(Exception):
    """An invalid manifest. `problems` are all of its problems, in the order of the file. `checked` is the job, with
    valid values in the place of invalid ones, for further checks; None if there is no job."""

    def __init__(self, problems: list[Problem], checked: Checked | None = None) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
        self.checked = checked


@dataclass(frozen=True, slots=True)
class ManifestDocument:
    """One document of a file: an RLJob, an invalid one, or an object of another kind."""

    file: Path
    document: Document
    number: int | None
    """Number of the document, from 1; None if it is the only one."""

    @property
    def other_kind(self) -> str | None:
        """Kind of the object if it is not an RLJob and the file has several documents; None: it must be an RLJob."""
        data = self.document.data
        if self.number is None or not isinstance(data, dict) or data.get("apiVersion") == API_VERSION:
            return None
        kind = data.get("kind")
        return kind if isinstance(kind, str) and kind.lower() != "rljob" and data.get("apiVersion") else None

    def load(self) -> RLJob:
        """The RLJob, with all defaults. Raises ManifestError."""
        self._check_kind()
        found = [*self._ambiguities(), *self._kind_problems()]
        named = {field for field, _ in found}
        text = ProblemText(self.document, self.file.parent)
        result = checked(self.document.data)
        found += [(error["loc"], text.of(error)) for error in result.errors if error["loc"] not in named]
        if found:
            problems = [self.problem(field, message) for field, message in found]
            raise ManifestError(sorted(problems, key=lambda problem: problem.line or 0), result)
        return result.job

    def problems(self) -> list[Problem]:
        """All problems of the document; none of another kind of object."""
        try:
            if self.other_kind is None:
                self.load()
        except ManifestError as error:
            return error.problems
        return []

    def problem(self, field: FieldPath, message: str, severity: Severity = "error") -> Problem:
        """A problem of a field of this document."""
        setting = setting_of(self.document, field)
        line = None if setting else self.document.line_of(field)
        return Problem(self.file, dotted(field), message, line, self.number, severity, setting)

    def with_settings(self, settings: Sequence[str]) -> ManifestDocument:
        """This document with the fields that options of the command line set, as in
        `rljob_api.manifest.settings.with_settings`. Raises ManifestError."""
        if not isinstance(self.document.data, dict):
            return self
        try:
            return replace(self, document=with_settings(self.document, settings))
        except SettingError as error:
            raise ManifestError([Problem(self.file, "", str(error), setting=error.setting)]) from None

    def _check_kind(self) -> None:
        """Raises ManifestError with one message if the document has another kind of object, or two objects."""
        data = self.document.data
        if not isinstance(data, dict):
            found = "a list: remove the dash before apiVersion" if isinstance(data, list) else f"the text {data!r:.60}"
            if isinstance(data, str) and "\u00a0" in data:
                found += "; replace its no-break spaces (U+00A0) by spaces"
            message = f"expected an RLJob with apiVersion, kind, metadata and spec, found {found}"
            raise ManifestError([self.problem((), message)])
        repeated = [field.path for field in self.document.duplicates if field.path in _TOP_LEVEL_FIELDS]
        if len(repeated) > 1:
            message = "a second object begins here: write a line --- before it"
            line = min(self.document.lines[path] for path in repeated)
            raise ManifestError([Problem(self.file, "", message, line, self.number)])
        kind = data.get("kind", "RLJob" if "spec" in data else None)
        if str(kind).lower() != "rljob":
            problems = self._kind_problems()
            if str(kind).endswith("List"):
                problems = [
                    (("kind",), f"expected RLJob, found {kind}: write each of its items as a document, after ---")
                ]
            raise ManifestError([self.problem(*problem) for problem in problems])

    def _kind_problems(self) -> list[tuple[FieldPath, str]]:
        found: list[tuple[FieldPath, str]] = []
        for field, expected in (("apiVersion", API_VERSION), ("kind", "RLJob")):
            value = self.document.data.get(field)
            if value != expected:
                actual = f"found {value!r}" if value is not None else "found none"
                found.append(((field,), f"expected {expected}, {actual}; write {field}: {expected}"))
        return found

    def _ambiguities(self) -> list[tuple[FieldPath, str]]:
        """Fields with a value that differs from its appearance: duplicates, and octal numbers."""
        return [
            *(
                (path, f"occurs twice, first in line {first}, and YAML silently uses the last: remove one")
                for path, first in self.document.duplicates
            ),
            *(
                (path, f"YAML reads {text} as the octal number {int(text, 8)}: write {text.lstrip('0') or '0'}")
                for path, text in self.document.written.items()
                if _OCTAL.fullmatch(text) and is_number(path)
            ),
        ]


_TOP_LEVEL_FIELDS = (("apiVersion",), ("kind",), ("metadata",), ("spec",))
_OCTAL = re.compile(r"0[0-7]+")


def load_manifest(path: Path) -> RLJob:
    """The only RLJob in the YAML (or JSON) file at `path`, with all defaults. Raises ManifestError."""
    return only_job(path).load()


def only_job(path: Path, settings: Sequence[str] = ()) -> ManifestDocument:
    """The only RLJob in the file at `path`, not checked yet, changed by `settings`. Raises ManifestError.

    Other kinds of objects in the file, such as a ConfigMap, are ignored.
    """
    documents = [document for document in read_manifest(path, read_text(path)) if document.other_kind is None]
    if len(documents) != 1:
        found = f"{len(documents)} of them: write each to its own file" if documents else "other kinds of objects only"
        line = documents[1].document.line_of(()) if documents else None
        raise ManifestError([Problem(path, "", f"expected one RLJob, found {found}", line)])
    return documents[0].with_settings(settings)


def read_manifest(path: Path, text: str) -> list[ManifestDocument]:
    """The documents in `text`, at least one. Messages name the file `path`. Raises ManifestError if a document is not
    YAML, with the problems of the documents before it."""
    documents: list[Document] = []
    try:
        documents += read_documents(text)
    except yaml.YAMLError as error:
        message, line = explain(text, error)
        before = [ManifestDocument(path, found, n) for n, found in enumerate(documents, 1)]
        problems = [problem for document in before for problem in document.problems()]
        raise ManifestError([*problems, Problem(path, "", f"is not YAML: {message}", line)]) from None
    if not documents:
        raise ManifestError([Problem(path, "", "expected an RLJob, found an empty file")])
    several = len(documents) > 1
    return [ManifestDocument(path, found, n if several else None) for n, found in enumerate(documents, 1)]


def read_text(path: Path) -> str:
    """The text of a manifest. Raises ManifestError."""
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST_MANIFEST_BYTES + 1)
        if len(content) <= _LARGEST_MANIFEST_BYTES:
            return decoded(path, content)
        message = f"expected at most {_LARGEST_MANIFEST_BYTES >> 20} MiB, found more: name the file of one RLJob"
    except FileNotFoundError:
        message = "expected a manifest, found no such file"
    except IsADirectoryError:
        message = "expected a manifest, found a directory: name a file in it"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    raise ManifestError([Problem(path, "", message)])


def decoded(path: Path, content: bytes) -> str:
    """The text of a manifest with this content. Raises ManifestError. Messages name the file `path`."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ManifestError([Problem(path, "", "expected UTF-8 text, found UTF-16: save the file as UTF-8")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        message = f"expected UTF-8 text, found byte 0x{byte:02x} at offset {error.start}: save the file as UTF-8"
        raise ManifestError([Problem(path, "", message, line)]) from None


def dotted(path: FieldPath) -> str:
    """`spec.trainer.args[0]` for ("spec", "trainer", "args", 0)."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
