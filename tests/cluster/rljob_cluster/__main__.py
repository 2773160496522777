"""Command line of the test cluster: `python -m rljob_cluster`. Prints errors as one line, without a traceback."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rljob_cluster import cluster, status
from rljob_cluster.binaries import CONTROL_PLANE, KWOK, MODULES, only
from rljob_cluster.binaries import build as build_modules
from rljob_cluster.commands import ClusterError, ProgressLines
from rljob_cluster.control_plane import ControlPlane
from rljob_cluster.images import load
from rljob_cluster.layout import ClusterLayout

app = typer.Typer(help="A real Kubernetes on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()
progress = ProgressLines(console)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=0, help="Number of KWOK nodes to add, for tests of scale.")] = 0,
) -> None:
    """Start the cluster, and build missing programs first. Does nothing if the cluster is running."""
    layout = ClusterLayout.default()
    cluster.up(layout, progress)
    if nodes:
        cluster.add_fake_nodes(layout, nodes, progress)


@app.command()
def down(
    images: Annotated[bool, typer.Option("--images", help="Also remove the images on the nodes.")] = False,
) -> None:
    """Stop the cluster and remove its state. Its programs and images are kept."""
    cluster.down(ClusterLayout.default(), progress, images=images)


@app.command(name="status")
def show_status() -> None:
    """Show nodes, programs, images and disk usage. Exits with code 1 if the cluster is not running."""
    if not status.show(ClusterLayout.default(), console):
        raise typer.Exit(1)


@app.command()
def kubeconfig() -> None:
    """Print the path of the cluster's kubeconfig."""
    typer.echo(ClusterLayout.default().kubeconfig)


@app.command()
def env() -> None:
    """Print shell variables for using the cluster: eval "$(python -m rljob_cluster env)"."""
    layout = ClusterLayout.default()
    typer.echo(f"export KUBECONFIG={layout.kubeconfig}\nexport PATH={layout.binaries}:$PATH")


@app.command()
def load_image(
    images: Annotated[
        list[str], typer.Argument(help="Names of images that buildah built, or files: OCI or Docker archives.")
    ],
) -> None:
    """Load images onto all nodes that do not have them."""
    layout = ClusterLayout.default()
    cluster.require_up(layout)
    for image in images:
        with progress.step(f"loading {image}"):
            load(layout, image)


@app.command()
def build(
    with_kwok: Annotated[bool, typer.Option("--fake-nodes", help="Also build KWOK, which simulates nodes.")] = False,
    control_plane: Annotated[
        bool, typer.Option("--control-plane", help="Build only the control plane, kubectl and Helm.")
    ] = False,
) -> None:
    """Build the programs of the cluster. Does not need root."""
    layout = ClusterLayout.default()
    modules = only((*CONTROL_PLANE, "helm")) if control_plane else MODULES
    build_modules((*modules, KWOK) if with_kwok else modules, layout.binaries, progress)
    progress.say(f"programs: {layout.binaries}")


@app.command()
def control_plane(
    directory: Annotated[Path, typer.Argument(help="Directory for data, logs and the kubeconfig.")],
    base_port: Annotated[int, typer.Option(help="First of the three ports on 127.0.0.1.")] = 26443,
    controller_manager: Annotated[
        bool, typer.Option("--controller-manager", help="Also run the controller manager.")
    ] = False,
    scheduler: Annotated[bool, typer.Option("--scheduler", help="Also run the scheduler.")] = False,
) -> None:
    """Run only etcd and the API server, until interrupted. Does not need root."""
    plane = ControlPlane(directory, base_port=base_port, controller_manager=controller_manager, scheduler=scheduler)
    with plane, suppress(KeyboardInterrupt):
        progress.say(f"kubectl:    {plane.kubectl}\nkubeconfig: {plane.kubeconfig}")
        signal.pause()


if __name__ == "__main__":
    try:
        app(prog_name="python -m rljob_cluster")
    except ClusterError as error:
        sys.exit(f"error: {error}")
