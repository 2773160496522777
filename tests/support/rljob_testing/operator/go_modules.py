"""Files that other projects publish in their Go modules: CRDs of Kueue and Volcano, stages of KWOK."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

KUEUE = ("sigs.k8s.io/kueue@v0.19.0", "config/components/crd/bases/*.yaml")
VOLCANO = ("volcano.sh/volcano@v1.10.0", "config/crd/volcano/bases/scheduling.volcano.sh_*.yaml")


class ModuleUnavailable(Exception):
    """Go is not installed, or the module cannot be downloaded; the message names which."""


def module_files(module: str, pattern: str) -> list[Path]:
    """Files of `module` (path@version) by a glob. The module is downloaded into Go's cache if necessary."""
    command = ["go", "mod", "download", "-json", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModuleUnavailable(f"{' '.join(command)}: {error}") from None
    answer = json.loads(done.stdout or "{}")
    if "Dir" not in answer:
        raise ModuleUnavailable(f"{' '.join(command)}: {answer.get('Error', done.stderr.strip())}")
    return sorted(Path(answer["Dir"]).glob(pattern))
