"""Programs of a cluster, the Go modules they are built from, and the folder of the built programs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_cluster.errors import ClusterError

SOURCES = Path(__file__).parents[1] / "binaries"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


@dataclass(frozen=True, slots=True)
class Module:
    """Folder in SOURCES whose go.mod and go.sum pin all dependencies, with its programs and their Go packages."""

    name: str
    programs: dict[str, str]
    linker_flags: str = ""


KUBERNETES_VERSION = "v1.36.3"
_VERSION = "k8s.io/component-base/version"

MODULES = (
    Module(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-proxy",
                "kube-scheduler",
                "kubectl",
                "kubelet",
            )
        },
        f"-X {_VERSION}.gitVersion={KUBERNETES_VERSION} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=36",
    ),
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Module(
        "containerd",
        {
            name: f"github.com/containerd/containerd/v2/cmd/{name}"
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        },
    ),
    Module(
        "addons",
        {
            "helm": "helm.sh/helm/v4/cmd/helm",
            "coredns": "./coredns",
            "pause": "./pause",
            "volume-provisioner": "./volume-provisioner",
        },
        "-X helm.sh/helm/v4/internal/version.version=v4.3.1",
    ),
)
KWOK = Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"})
CLUSTER = tuple(program for module in MODULES for program in module.programs)


def only(programs: Collection[str]) -> tuple[Module, ...]:
    """MODULES without programs of other names."""
    chosen = ({name: package for name, package in module.programs.items() if name in programs} for module in MODULES)
    return tuple(replace(module, programs=kept) for module, kept in zip(MODULES, chosen, strict=True) if kept)


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "cluster"


def binary_directory() -> Path:
    """Folder of the built programs: $RLJOB_CLUSTER_BIN, or a folder in the cache for the pinned versions."""
    if chosen := os.environ.get("RLJOB_CLUSTER_BIN"):
        return Path(chosen)
    return cache_directory() / "bin" / versions_key(build_inputs())


def build_inputs() -> dict[str, bytes]:
    """Inputs of the build: the files of the modules, by path, and the list of programs."""
    files = (path for path in SOURCES.rglob("*") if path.suffix in {".go", ".mod", ".sum"})
    programs = repr((*MODULES, KWOK)).encode()
    return {str(path.relative_to(SOURCES)): path.read_bytes() for path in files} | {"programs": programs}


def versions_key(files: dict[str, bytes]) -> str:
    """Short hash of the files' content, so that each set of versions has its own folder."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
    return digest.hexdigest()[:12]


def require_binaries(directory: Path, names: Iterable[str]) -> None:
    """Raises ClusterError if a program is not built."""
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ClusterError(
            f"expected the programs of Kubernetes in {directory}; missing: {', '.join(missing)}. "
            "Build them with `python -m rljob_cluster build` (some minutes, once)."
        )
