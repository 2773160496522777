"""Environment variables of `spec.env` and `spec.envFrom`."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec


def with_user_entries(entries: list[dict[str, Any]], spec: RLJobSpec) -> list[dict[str, Any]]:
    """`entries` with those of the job, which override defaults. The API refuses names that RLJob depends on."""
    own = {variable.name: variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.env or ()}
    return [*(entry for entry in entries if entry["name"] not in own), *own.values()]


def env_from(spec: RLJobSpec) -> dict[str, Any]:
    """The field `envFrom` of a container; empty if the job has none. Variables of `env` take precedence."""
    sources = [source.model_dump(by_alias=True, exclude_none=True) for source in spec.env_from or ()]
    return {"envFrom": sources} if sources else {}
