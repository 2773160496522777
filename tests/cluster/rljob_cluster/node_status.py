"""Status of Node objects."""

from __future__ import annotations

from typing import Any

GPU_RESOURCE = "nvidia.com/gpu"


def reports_ready(node: dict[str, Any]) -> bool:
    conditions = {condition["type"]: condition["status"] for condition in node["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"


def gpus(node: dict[str, Any]) -> int:
    """Number of GPUs that pods can use on the node."""
    return int(node["status"].get("allocatable", {}).get(GPU_RESOURCE, 0))
