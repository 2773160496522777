"""`python -m rljob_cluster`: a real Kubernetes on this machine."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rljob_cluster import cluster, fake_nodes, status
from rljob_cluster.binaries import KWOK, MODULES
from rljob_cluster.build import build as build_modules
from rljob_cluster.control_plane import ControlPlane
from rljob_cluster.images import load
from rljob_cluster.layout import ClusterLayout
from rljob_cluster.progress import Progress

app = typer.Typer(help="A real Kubernetes on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()
progress = Progress(console)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=0, help="Add this many fake nodes, for tests of scale.")] = 0,
) -> None:
    """Build what is not built, and bring the cluster up. Does nothing where it is up."""
    layout = ClusterLayout.default()
    cluster.up(layout, progress)
    if nodes:
        fake_nodes.add(layout, nodes, progress)


@app.command()
def down(
    images: Annotated[bool, typer.Option("--images", help="Remove the images that the nodes hold, too.")] = False,
) -> None:
    """End the cluster and remove it. Its programs stay, and its images."""
    cluster.down(ClusterLayout.default(), progress, images=images)


@app.command(name="status")
def show_status() -> None:
    """Show nodes, programs, images and disk. Exits with 1 where the cluster is down."""
    if not status.show(ClusterLayout.default(), console):
        raise typer.Exit(1)


@app.command()
def kubeconfig() -> None:
    """Print the path of the cluster's kubeconfig."""
    typer.echo(ClusterLayout.default().kubeconfig)


@app.command()
def env() -> None:
    """Print what makes a shell talk to the cluster: eval "$(python -m rljob_cluster env)"."""
    layout = ClusterLayout.default()
    typer.echo(f"export KUBECONFIG={layout.kubeconfig}\nexport PATH={layout.binaries}:$PATH")


@app.command()
def load_image(
    images: Annotated[list[str], typer.Argument(help="Names of buildah's images, or files: OCI or Docker archives.")],
) -> None:
    """Put images onto every node that lacks them."""
    layout = ClusterLayout.default()
    cluster.require_up(layout)
    for image in images:
        with progress.step(f"loading {image}"):
            load(layout, image)


@app.command()
def build(with_kwok: Annotated[bool, typer.Option("--fake-nodes", help="What plays fake nodes, too.")] = False) -> None:
    """Build the programs of the cluster. Needs no root."""
    layout = ClusterLayout.default()
    build_modules((*MODULES, KWOK) if with_kwok else MODULES, layout.binaries, progress)
    progress.say(f"the programs are in {layout.binaries}")


@app.command()
def control_plane(
    directory: Annotated[Path, typer.Argument(help="Holds its files, its logs, and the kubeconfig.")],
    base_port: Annotated[int, typer.Option(help="The first of the three ports it listens on, on 127.0.0.1.")] = 26443,
    controller_manager: Annotated[bool, typer.Option("--controller-manager", help="With its controllers.")] = False,
    scheduler: Annotated[bool, typer.Option("--scheduler", help="With the scheduler.")] = False,
) -> None:
    """Run etcd and the API server alone until interrupted. Needs no root."""
    plane = ControlPlane(directory, base_port=base_port, controller_manager=controller_manager, scheduler=scheduler)
    with plane, suppress(KeyboardInterrupt):
        progress.say(f"kubectl:    {plane.kubectl}\nkubeconfig: {plane.kubeconfig}")
        signal.pause()
