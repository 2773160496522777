"""Volumes of the user that a job mounts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from rljob_api.api_model import ApiModel, Rule, Text

ObjectName = Annotated[
    str,
    Text(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        expected="the name of an object: lower-case letters, digits, - and .",
    ),
]
Directory = Annotated[
    str,
    Text(
        pattern=r"^[^/.][^/]*(/[^/.][^/]*)*$",
        expected="a relative directory, such as data/train, without parts that begin with a dot",
        max_length=1024,
    ),
]


def _sources(files: Any) -> int:
    return (files.config_map is not None) + (files.persistent_volume_claim is not None)


class TaskFiles(ApiModel):
    """Files of the task in pods, mounted read-only: reward modules and data files. Name one source."""

    config_map: ObjectName | None = None
    """Name of a ConfigMap in the job's namespace: one file for each of its keys, 1 MiB in all."""

    persistent_volume_claim: ObjectName | None = None
    """Name of a claim in the job's namespace, for larger files and for Python packages."""

    path: Directory | None = None
    """Directory on the claim. Absent: its root."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.configMap) != has(self.persistentVolumeClaim)",
            holds=lambda files: _sources(files) == 1,
            field="configMap",
            message="write either configMap or persistentVolumeClaim",
        ),
        Rule(
            cel="!has(self.path) || has(self.persistentVolumeClaim)",
            holds=lambda files: files.path is None or files.persistent_volume_claim is not None,
            field="path",
            message="is for a claim only: a ConfigMap has no directories; remove it",
        ),
    )


class ModelCache(ApiModel):
    """Volume for models of the Hugging Face hub and for compiled code, which jobs can share."""

    persistent_volume_claim: ObjectName
    """Name of a claim in the job's namespace. All pods that use it must be able to write to it (ReadWriteMany)."""

    path: Directory | None = None
    """Directory on the claim. Absent: its root."""

    compiled: bool = False
    """If true, code that torch, Triton and vLLM compile is kept on the claim for other jobs. Anyone who can write to
    the claim can then run code in the pods of these jobs. If false, it is kept with the checkpoints, for the attempts
    of this job."""
