"""Requirements of a program, checked before it starts: GPUs and packages. Imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
import sys

from rljob_trainer.hardware import visible_gpus


def require_gpus(count: int) -> None:
    """Exit with a message unless this process sees at least `count` GPUs."""
    found = [gpu.name for gpu in visible_gpus()]
    if len(found) < count:
        sys.exit(
            f"expected {count} NVIDIA {'GPU' if count == 1 else 'GPUs'}, found {', '.join(found) or 'none'}; "
            "run this program on such a machine, or check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )


def require_package(name: str, *, without: str = "") -> None:
    """Exit with a message unless the package can be imported. `without`: one that breaks it, and must be absent."""
    if importlib.util.find_spec(name) is None:
        sys.exit(f"expected the package {name}, found none; install it, or add its directory to PYTHONPATH")
    if without and importlib.util.find_spec(without) is not None:
        sys.exit(f"expected an environment without {without}, which breaks {name}; remove it from PYTHONPATH")
