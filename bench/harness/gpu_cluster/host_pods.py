"""Pods that run this machine's own Python rather than an image.

A machine without network access has no trainer image, but it has torch, vLLM and the driver's libraries. The pods mount
its folders, read-only, at the same paths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.harness.gpu_cluster.namespaces import ADDRESS
from rljob_cluster.layout import ClusterLayout
from rljob_cluster.oci_archive import SmallImage

IMAGE = "localhost/rljob/on-host:1"
_IMAGE_PROGRAMS = "/rljob/bin"
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/nsswitch.conf")
_PASSED_ON = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTHONPATH")
_PASSED_ON_PREFIXES = ("VLLM_", "TORCH_", "NCCL_")
_WORKER_FIRST_PORT = 7380


def image() -> SmallImage:
    """An image with only the program `rljob`. Both pods have the node's address, so the worker's Ray uses other
    ports."""
    rljob = f"""\
#!/bin/sh
if [ "$1" = worker ]; then export RLJOB_RAY_FIRST_PORT={_WORKER_FIRST_PORT}; fi
exec {sys.executable} -m rljob_trainer "$@"
"""
    return SmallImage(IMAGE, {f"{_IMAGE_PROGRAMS[1:]}/rljob": rljob.encode()}, {}, (f"{_IMAGE_PROGRAMS}/rljob",))


def template(layout: ClusterLayout, head: str) -> dict[str, Any]:
    """Part of a pod template: this machine's files and network. `head`: host name of the controller; there is no
    DNS."""
    folders = {f"host-{number}": path for number, path in enumerate(_host_paths())}
    volumes = [{"name": name, "hostPath": {"path": path}} for name, path in folders.items()]
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path in folders.items()]
    # Not read-only: the container's own /dev/shm and termination log are mounted into it.
    volumes.append({"name": "devices", "hostPath": {"path": "/dev"}})
    mounts.append({"name": "devices", "mountPath": "/dev"})
    container = {
        "env": [{"name": name, "value": value} for name, value in _environment(layout).items()],
        "securityContext": {"privileged": True, "allowPrivilegeEscalation": True},
        "volumeMounts": mounts,
    }
    spec = {
        "hostNetwork": True,
        "hostAliases": [{"ip": ADDRESS, "hostnames": [head]}],
        "securityContext": {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0},
        "containers": [container],
        "volumes": volumes,
    }
    return {"spec": spec}


def _host_paths() -> list[str]:
    """Folders of the system, of this Python installation, and of its import path."""
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent), *sys.path]
    imported = [str(Path(path).absolute()) for path in python if path and Path(path).is_dir()]
    system = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES) if Path(path).exists()]
    return [*system, *_outermost(path for path in imported if not _is_below(path, _SYSTEM_FOLDERS))]


def _outermost(paths: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not _is_below(path, kept):
            kept.append(path)
    return kept


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _environment(layout: ClusterLayout) -> dict[str, str]:
    passed_on = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    return {
        "PATH": f"{_IMAGE_PROGRAMS}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        # Services have no addresses here: nothing of the node routes them.
        "KUBERNETES_SERVICE_HOST": layout.control_plane.address,
        "KUBERNETES_SERVICE_PORT": str(layout.control_plane.api_port),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **passed_on,
    }
