"""A finding of the validation."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.manifest import Severity
from rljob_api.yaml_document import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a field of a valid manifest."""

    severity: Severity
    """error: the job would fail. warning: probably a mistake, or not checked although it could be. note: cannot be
    checked on this machine, or a prediction."""

    field: Path
    """Path of the field, such as ("spec", "model", "uri")."""

    message: str
