"""Interval and storage of checkpoints."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable
from rljob_api.metadata import checkpoint_claim_name
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

    export_every_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Steps between exports of the model in Hugging Face format, to models/step-000040 in the output directory. Absent:
    only the model after the last step is exported. `rljob export` exports the model of a checkpoint."""

    keep_exports: int = Field(default=2, ge=1, le=1000)
    """Number of exports to keep in models/, the latest ones."""

    accept_changed_inputs: bool = False
    """If true, a run with committed steps resumes although its data, its reward code or the files of its model have
    changed. Otherwise it is refused."""

    volume: dict[str, FreeForm] | None = Field(default=None, json_schema_extra=immutable())
    """Kubernetes volume source for checkpoints and the journal, such as persistentVolumeClaim: {claimName: …}. Absent:
    the operator creates a claim for the job. rljob run ignores it and writes to its output directory."""

    size: Bytes | None = Field(default=None, json_schema_extra=immutable())
    """Size of the claim that the operator creates, as a Kubernetes quantity. Absent: the operator's default."""

    storage_class_name: StorageClassName | None = Field(default=None, json_schema_extra=immutable())
    """StorageClass of the claim that the operator creates; it must support ReadWriteMany. Absent: the operator's
    default, otherwise the cluster's."""

    retain: bool = Field(default=False, json_schema_extra=immutable())
    """If true, the claim that the operator creates stays when the job is deleted. A later job of the same name resumes
    from it if it names it in volume: persistentVolumeClaim: {claimName: <job>-checkpoints}."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.size) && !has(self.storageClassName) || !has(self.volume)",
            holds=lambda spec: spec.volume is None or (spec.size is None and spec.storage_class_name is None),
            field="volume",
            message="cannot be combined with size or storageClassName, which describe the claim that the operator "
            "creates: remove them, or remove volume",
        ),
        Rule(
            cel="size(self.volume) == 1",
            holds=lambda spec: spec.volume is None or len(spec.volume) == 1,
            field="volume",
            message="expected one volume source, such as persistentVolumeClaim: {claimName: …}: remove the others, or "
            "remove volume",
        ),
        Rule(
            cel="!self.retain || !has(self.volume)",
            holds=lambda spec: spec.volume is None or not spec.retain,
            field="retain",
            message="is for the claim that the operator creates; a volume of your own always stays: remove retain",
        ),
    )

    def volume_source(self, job: str) -> FreeForm:
        """Kubernetes volume source of the checkpoints of a job of this name."""
        if self.volume is not None:
            return self.volume
        return {"persistentVolumeClaim": {"claimName": checkpoint_claim_name(job)}}

    def directory(self, job: str) -> str:
        """Output directory of the job on the volume; empty for its root.

        A volume that the user names may be shared by jobs, so the directory is named after the job. In a claim that is
        retained too: a later job names it as its volume.
        """
        return "" if self.volume is None and not self.retain else job
