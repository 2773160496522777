"""Programs of a cluster, the Go modules they are built from, and the folder of the built programs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_cluster.commands import ClusterError, ProgressLines

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


# Build of the programs of a cluster from their Go modules.

LOG_LINES = 8


def build(modules: Iterable[Module], directory: Path, progress: ProgressLines) -> None:
    """Build the programs that `directory` lacks. An interrupted build resumes, because Go caches compiled packages.

    Raises ClusterError if Go is missing or a build fails.
    """
    wanted = [(module, name) for module in modules for name in module.programs if not (directory / name).exists()]
    if not wanted:
        return
    if not shutil.which("go"):
        raise ClusterError("expected the Go toolchain, 1.26 or newer, to build Kubernetes; found no `go` on the PATH")
    directory.mkdir(parents=True, exist_ok=True)
    for position, (module, name) in enumerate(wanted, 1):
        with progress.step(f"building {name}, {position} of {len(wanted)}"):
            build_program(module, name, directory / name)


def build_program(module: Module, name: str, target: Path) -> None:
    """Build one program, and move it to `target` when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as partial:
        built = Path(partial) / name
        done = subprocess.run(
            build_command(module, name, built),
            cwd=SOURCES / module.name,
            env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join(done.stderr.splitlines()[-LOG_LINES:])
            raise ClusterError(f"`go build` of {name} in {SOURCES / module.name} failed:\n{tail}")
        built.replace(target)


def build_command(module: Module, name: str, output: Path) -> list[str]:
    linker_flags = f"-s -w {module.linker_flags}".strip()
    return ["go", "build", "-trimpath", "-ldflags", linker_flags, "-o", str(output), module.programs[name]]
