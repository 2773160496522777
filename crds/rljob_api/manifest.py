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

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else str(self.file)
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class ManifestError(Exception):
    """An invalid manifest. `problems` has all of its problems, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def load_manifest(path: Path) -> RLJob:
    """The RLJob in the YAML (or JSON) file at `path`, with all defaults. Raises ManifestError."""
    document = _only_document(path, _read_text(path))
    _check_kind(path, document)
    text = ProblemText(document.data)
    found = [
        *((field, "occurs twice, and YAML silently uses the last: remove one") for field in document.duplicates),
        *((error["loc"], text.of(error)) for error in all_errors(document.data)),
    ]
    if found:
        problems = [Problem(path, dotted(field), message, document.line_of(field)) for field, message in found]
        raise ManifestError(sorted(problems, key=lambda problem: problem.line or 0))
    return RLJob.model_validate(document.data, by_alias=True, by_name=False)


def _read_text(path: Path) -> str:
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


def _only_document(path: Path, text: str) -> Document:
    try:
        documents = read_documents(text)
    except yaml.YAMLError as error:
        raise ManifestError([_broken_yaml(path, error)]) from None
    if not documents:
        raise ManifestError([Problem(path, "", "expected an RLJob, found an empty file")])
    if len(documents) > 1:
        message = f"expected one RLJob, found {len(documents)} documents: write each to its own file"
        raise ManifestError([Problem(path, "", message, documents[1].line_of(()))])
    return documents[0]


def _broken_yaml(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    hint = "; indent with spaces" if "\\t" in reason else ""
    return Problem(path, "", f"is not YAML: {reason}{hint}", mark.line + 1 if mark else None)


def _check_kind(path: Path, document: Document) -> None:
    """Raises ManifestError with one message for another kind of object, rather than a list of unknown fields."""
    if not isinstance(document.data, dict):
        message = "expected an RLJob with apiVersion, kind, metadata and spec, found no object"
        raise ManifestError([Problem(path, "", message)])
    problems = []
    for field, expected in (("apiVersion", API_VERSION), ("kind", "RLJob")):
        found = document.data.get(field)
        if found != expected:
            actual = f"found {found!r}" if found is not None else "found none"
            message = f"expected {expected}, {actual}; write {field}: {expected}"
            problems.append(Problem(path, field, message, document.line_of((field,))))
    if problems:
        raise ManifestError(problems)


def dotted(path: FieldPath) -> str:
    """`spec.trainer.args[0]` for ("spec", "trainer", "args", 0)."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
