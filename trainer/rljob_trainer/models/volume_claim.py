"""`pvc://claim/path`: a directory on a volume that Kubernetes mounts."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from rljob_trainer.errors import BadInput


def resolve(location: str, _cache_directory: Path) -> NoReturn:
    raise BadInput(
        f"pvc://{location} exists only inside a Kubernetes cluster; on this machine, copy the model to a directory "
        "and name it as file:///path/to/model"
    )
