"""What a user may add to the pods of a role."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm


class PodTemplate(ApiModel):
    """Overrides of the pods that RLJob makes, as in a Kubernetes PodTemplate; merged strategically over RLJob's own."""

    metadata: FreeForm = Field(default_factory=dict)
    """Labels and annotations to add."""

    spec: FreeForm = Field(default_factory=dict)
    """PodSpec fields to add: nodeSelector, tolerations, volumes, resources of the container `rljob`, …"""
