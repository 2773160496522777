"""Overrides of the pods of a role."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm


class PodTemplate(ApiModel):
    """Overrides of the pods of a role, as in a Kubernetes PodTemplate. The operator merges them over its own pod by
    strategic merge."""

    metadata: FreeForm = Field(default_factory=dict)
    """Labels and annotations to add."""

    spec: FreeForm = Field(default_factory=dict)
    """PodSpec fields to add or override, such as nodeSelector, tolerations, volumes, or resources of the container
    rljob."""
