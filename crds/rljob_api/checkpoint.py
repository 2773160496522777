"""When checkpoints are made, and where they are kept."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable
from rljob_api.quantity import Bytes

StorageClassName = Annotated[
    str,
    Text(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        expected="the name of a StorageClass: lower-case letters, digits, - and .",
    ),
]


class CheckpointSpec(ApiModel):
    """When checkpoints are made, and where they are kept."""

    every_steps: int = Field(default=10, ge=1, le=1_000_000)
    """Steps between checkpoints. Steps since the last one are replayed on a restart, without generating anew."""

    keep: int = Field(default=2, ge=1, le=100)
    """Checkpoints kept. With 2, a corrupt one costs nothing but a longer replay."""

    volume: FreeForm | None = Field(default=None, json_schema_extra=immutable())
    """Kubernetes volume source for checkpoints and rollouts, such as persistentVolumeClaim: {claimName: …}. Absent: a
    claim made for the job. `rljob run` writes to its output directory instead."""

    size: Bytes | None = Field(default=None, json_schema_extra=immutable())
    """Size of the claim made for the job. Absent: what the operator's installation says."""

    storage_class_name: StorageClassName | None = Field(default=None, json_schema_extra=immutable())
    """StorageClass of the claim made for the job; it must offer ReadWriteMany. Absent: what the operator's installation
    says, or the cluster's default."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.volume) || !has(self.size) && !has(self.storageClassName)",
            holds=lambda spec: spec.volume is None or (spec.size is None and spec.storage_class_name is None),
            field="volume",
            message="excludes size and storageClassName, which are about the claim made for the job: remove them, or "
            "remove volume",
        ),
    )
