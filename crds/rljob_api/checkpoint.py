"""Interval and storage of checkpoints."""

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
    """Interval and storage of checkpoints."""

    every_steps: int = Field(default=10, ge=1, le=1_000_000)
    """Steps between checkpoints. After a restart, the trainer replays the steps since the last one from the journal,
    without generating or scoring again."""

    keep: int = Field(default=2, ge=1, le=100)
    """Number of checkpoints to keep. With at least 2, a corrupt checkpoint only costs a longer replay."""

    volume: FreeForm | None = Field(default=None, json_schema_extra=immutable())
    """Kubernetes volume source for checkpoints and the journal, such as persistentVolumeClaim: {claimName: …}. Absent:
    the operator creates a claim for the job. rljob run ignores it and writes to its output directory."""

    size: Bytes | None = Field(default=None, json_schema_extra=immutable())
    """Size of the claim that the operator creates, as a Kubernetes quantity. Absent: the operator's default."""

    storage_class_name: StorageClassName | None = Field(default=None, json_schema_extra=immutable())
    """StorageClass of the claim that the operator creates; it must support ReadWriteMany. Absent: the operator's
    default, otherwise the cluster's."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.volume) || !has(self.size) && !has(self.storageClassName)",
            holds=lambda spec: spec.volume is None or (spec.size is None and spec.storage_class_name is None),
            field="volume",
            message="cannot be combined with size or storageClassName, which describe the claim that the operator "
            "creates: remove them, or remove volume",
        ),
    )
