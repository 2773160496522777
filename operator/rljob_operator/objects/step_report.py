"""The empty StepReport that the controller pod fills: it may patch it, not create it."""

from __future__ import annotations

from rljob_api.names import API_VERSION
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata


def build_step_report(attempt: JobAttempt) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": "StepReport",
        "metadata": object_metadata(attempt, names.step_report_name(attempt.name)),
    }
