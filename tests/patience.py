"""How long tests wait for what a whole trainer does."""

from __future__ import annotations

PATIENCE_SECONDS = 480.0
"""For steps of a job, whose processes first import torch and vLLM: minutes on two cores that also run other tests. Less
than the 600 s after which pods are given up, which must not be what ends a wait."""
