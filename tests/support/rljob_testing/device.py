"""The device that a measurement was made on."""

from __future__ import annotations

import os
from pathlib import Path


def device() -> str:
    """Name of the first GPU, or of the processor with the number of usable cores."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
        return f"{model}, {len(os.sched_getaffinity(0))} cores"
