"""When checkpoints are made, and where they are kept."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm, immutable


class CheckpointSpec(ApiModel):
    """When checkpoints are made, and where they are kept."""

    every_steps: int = Field(default=10, ge=1, le=1_000_000)
    """Steps between checkpoints. Steps since the last one are replayed on a restart, without generating anew."""

    keep: int = Field(default=2, ge=1, le=100)
    """Checkpoints kept. With 2, a corrupt one costs nothing but a longer replay."""

    volume: FreeForm | None = Field(default=None, json_schema_extra=immutable())
    """Kubernetes volume source for checkpoints and rollouts, such as persistentVolumeClaim: {claimName: …}. Absent: a
    claim made for the job. `rljob run` writes to its output directory instead."""
