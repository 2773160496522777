"""Loading of manifests: the RLJob in a file, or all problems of the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from rljob_api.all_errors import all_errors
from rljob_api.job import RLJob
from rljob_api.names import API_VERSION
from rljob_api.problem_text import ProblemText
from rljob_api.yaml_document import Document, read_documents
from rljob_api.yaml_document import Path as FieldPath


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a manifest."""

    file: Path
    """The manifest."""
    path: str
    """Dotted path of the field; empty for the file itself."""
    message: str
    """Explanation of the problem, with what to write instead."""
    line: int | None = None
    """Line of the field, from 1."""
    document: int | None = None
    """Number of the document, from 1, in a file with several documents."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else str(self.file)
        document = f" (document {self.document})" if self.document else ""
        return f"{place}{document}: {self.path}: {self.message}" if self.path else f"{place}{document}: {self.message}"


class ManifestError(Exception):
    """An invalid manifest. `problems` has all of its problems, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class ManifestDocument:
    """One document of a file: an RLJob, an invalid one, or an object of another kind."""

    file: Path
    document: Document
    number: int | None
    """Number of the document, from 1; None if it is the only one."""

    @property
    def other_kind(self) -> str | None:
        """Kind of an object that is not an RLJob and stands beside other documents; None: it must be an RLJob."""
        data = self.document.data
        if self.number is None or not isinstance(data, dict) or data.get("apiVersion") == API_VERSION:
            return None
        kind = data.get("kind")
        return kind if isinstance(kind, str) and kind.lower() != "rljob" and data.get("apiVersion") else None

    def load(self) -> RLJob:
        """The RLJob, with all defaults. Raises ManifestError."""
        self._check_kind()
        data = self.document.data
        text = ProblemText(data)
        found = [
            *(
                (field, "occurs twice, and YAML silently uses the last: remove one")
                for field in self.document.duplicates
            ),
            *((error["loc"], text.of(error)) for error in all_errors(data)),
        ]
        if found:
            problems = [self.problem(field, message) for field, message in found]
            raise ManifestError(sorted(problems, key=lambda problem: problem.line or 0))
        return RLJob.model_validate(data, by_alias=True, by_name=False)

    def problem(self, field: FieldPath, message: str) -> Problem:
        """A problem of a field of this document."""
        return Problem(self.file, dotted(field), message, self.document.line_of(field), self.number)

    def _check_kind(self) -> None:
        """Raises ManifestError with one message for another kind of object, rather than a list of unknown fields."""
        data = self.document.data
        if not isinstance(data, dict):
            message = "expected an RLJob with apiVersion, kind, metadata and spec, found no object"
            raise ManifestError([Problem(self.file, "", message, document=self.number)])
        problems = []
        for field, expected in (("apiVersion", API_VERSION), ("kind", "RLJob")):
            found = data.get(field)
            if found != expected:
                actual = f"found {found!r}" if found is not None else "found none"
                problems.append(self.problem((field,), f"expected {expected}, {actual}; write {field}: {expected}"))
        if problems:
            raise ManifestError(problems)


def load_manifest(path: Path) -> RLJob:
    """The only RLJob in the YAML (or JSON) file at `path`, with all defaults. Raises ManifestError.

    Objects of other kinds beside it, such as a ConfigMap, are ignored.
    """
    documents = [document for document in read_manifest(path, read_text(path)) if document.other_kind is None]
    if len(documents) != 1:
        found = f"{len(documents)} of them: write each to its own file" if documents else "other kinds of objects only"
        line = documents[1].document.line_of(()) if documents else None
        raise ManifestError([Problem(path, "", f"expected one RLJob, found {found}", line)])
    return documents[0].load()


def read_manifest(path: Path, text: str) -> list[ManifestDocument]:
    """The documents in `text`, at least one. `path`: for messages. Raises ManifestError if it is not YAML."""
    try:
        documents = read_documents(text)
    except yaml.YAMLError as error:
        raise ManifestError([_broken_yaml(path, error)]) from None
    if not documents:
        raise ManifestError([Problem(path, "", "expected an RLJob, found an empty file")])
    several = len(documents) > 1
    return [ManifestDocument(path, found, n if several else None) for n, found in enumerate(documents, 1)]


def read_text(path: Path) -> str:
    """The text of a manifest. Raises ManifestError."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        message = "expected a manifest, found no such file"
    except IsADirectoryError:
        message = "expected a manifest, found a directory: name a file in it"
    except UnicodeDecodeError as error:
        message = f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset {error.start}"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    raise ManifestError([Problem(path, "", message)])


def _broken_yaml(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    opened = getattr(error, "context_mark", None)
    if opened is not None and "quoted scalar" in (getattr(error, "context", None) or ""):
        message = f"is not YAML: the quotation mark that opens here is not closed ({reason})"
        return Problem(path, "", message, opened.line + 1)
    hint = "; indent with spaces" if "\\t" in reason else ""
    return Problem(path, "", f"is not YAML: {reason}{hint}", mark.line + 1 if mark else None)


def dotted(path: FieldPath) -> str:
    """`spec.trainer.args[0]` for ("spec", "trainer", "args", 0)."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
