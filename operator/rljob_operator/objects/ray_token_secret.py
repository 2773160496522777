"""The Secret with the token that every Ray process of the job must show to every other."""

from __future__ import annotations

from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata

TOKEN_KEY = "token"


def build_ray_token_secret(attempt: JobAttempt, token: str) -> Manifest:
    """To be created once: all attempts of the job use the same token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(attempt, names.ray_token_secret_name(attempt.name)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: token},
    }
