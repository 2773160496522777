"""Status of the cluster, as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rljob_cluster import cgroups, machine
from rljob_cluster.api_client import admin_client
from rljob_cluster.commands import run
from rljob_cluster.images import node_images
from rljob_cluster.layout import NODES, ClusterLayout


@dataclass(frozen=True, slots=True)
class Component:
    """A program of the cluster."""

    name: str
    pid: int
    """Process id on this machine, outside the cluster's namespaces."""
    memory_bytes: int
    """Resident memory."""


def show(layout: ClusterLayout, console: Console) -> bool:
    """Print the status. Returns False if the cluster is not running."""
    first = machine.first_process()
    if first is None or not layout.kubeconfig.exists():
        console.print(
            "the cluster is not running"
            if first is None
            else f"another cluster is running, not the one of {layout.root}"
        )
        console.print(f"disk: {disk(layout)}", highlight=False)
        return False
    console.print(nodes_table(layout))
    console.print(components_table(components(first)))
    for node in NODES:
        images = sorted(name for name in node_images(layout, node).digests() if not name.startswith("sha256:"))
        console.print(f"images on {node.name}: {', '.join(images)}", highlight=False, soft_wrap=True)
    paths = f"kubeconfig: {layout.kubeconfig}\nlogs: {layout.logs}\ndisk: {disk(layout)}"
    console.print(paths, highlight=False, soft_wrap=True)
    return True


def nodes_table(layout: ClusterLayout) -> Table:
    table = Table("node", "ready", "GPUs", box=None)
    found = json.loads(admin_client(layout.control_plane).get("/api/v1/nodes") or '{"items": []}')["items"]
    real = {node.name for node in NODES}
    for node in found:
        if node["metadata"]["name"] in real:
            table.add_row(node["metadata"]["name"], "yes" if reports_ready(node) else "no", str(gpus(node)))
    if fake := [node for node in found if node["metadata"]["name"] not in real]:
        table.add_row(f"{len(fake)} fake nodes", f"{sum(map(reports_ready, fake))} of them", "")
    return table


def components_table(found: Iterable[Component]) -> Table:
    table = Table("component", "process", "memory", box=None)
    for component in found:
        table.add_row(component.name, str(component.pid), f"{component.memory_bytes >> 20} MiB")
    return table


def components(first: int) -> list[Component]:
    """The programs that the machine's first process started."""
    found = []
    for pid in cgroups.processes(cgroups.MACHINE):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if int(fields["PPid"]) == first and "VmRSS" in fields and "shim" not in command[0]:
            found.append(Component(component_name(command), pid, int(fields["VmRSS"].split()[0]) << 10))
    return sorted(found, key=lambda component: component.name)


def component_name(command: list[str]) -> str:
    """Name of the program, with the name of its node if it belongs to one."""
    program = Path(command[0]).name
    nodes = [node.name for node in NODES if any(node.name in word for word in command[1:])]
    return f"{program} ({nodes[0]})" if nodes else program


def disk(layout: ClusterLayout) -> str:
    """Disk usage of the cluster's folders, including files that images share with the image builder's storage."""
    folders = [layout.binaries, layout.images, layout.state]
    there = [folder for folder in folders if folder.exists()]
    if not there:
        return "nothing"
    lines = run("du", "--summarize", "--block-size=1M", *there).splitlines()
    return ", ".join(f"{folder} {size} MB" for size, folder in (line.split("\t") for line in lines))


# Status of Node objects.

GPU_RESOURCE = "nvidia.com/gpu"


def reports_ready(node: dict[str, Any]) -> bool:
    conditions = {condition["type"]: condition["status"] for condition in node["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"


def gpus(node: dict[str, Any]) -> int:
    """Number of GPUs that pods can use on the node."""
    return int(node["status"].get("allocatable", {}).get(GPU_RESOURCE, 0))
