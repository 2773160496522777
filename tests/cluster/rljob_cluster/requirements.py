"""Requirements of a cluster on the machine, other than Python and Go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rljob_cluster.errors import ClusterError

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CNI_PLUGINS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
PROGRAMS = {
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "runc": "runc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def require_root(what: str) -> None:
    """Raises ClusterError if this process does not run as root."""
    if os.geteuid() != 0:
        raise ClusterError(
            f"{what} needs root; this process has user id {os.geteuid()}. Run it with sudo. "
            "`build` and `control-plane` work without."
        )


def require_packages() -> None:
    """Raises ClusterError with the command that installs missing packages."""
    if missing := missing_packages():
        raise ClusterError(
            f"this machine lacks {', '.join(missing)}. On Debian and Ubuntu: apt-get install {' '.join(missing)}"
        )


def missing_packages() -> list[str]:
    """Debian packages whose programs are missing."""
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=SEARCH_PATH)}
    if not any((folder / "ptp").exists() for folder in CNI_PLUGINS):
        missing.add("containernetworking-plugins")
    return sorted(missing)
