"""Command line `images/build`: builds images that changed, and prints the name, size and duration of each."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from image_build import debian_base
from image_build.builders import Builder, find_builder, run_with_progress
from image_build.package_index import build_secrets
from image_build.recipes import (
    CACHE,
    DEVICES,
    EXAMPLES,
    NAMES,
    REPOSITORY,
    ImageBuildError,
    Recipe,
    content_key,
    input_files,
    recipe,
    revision,
    source,
)

INPUTS_LABEL = "dev.rljob.inputs"
SMOLLM2 = CACHE / "models" / "localhost" / "models" / "smollm2-135m-instruct" / "1"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        builder = find_builder(options.builder)
        if options.check:
            return 0
        recipes = [
            recipe(name, device=options.device, model_directory=options.model_directory) for name in options.image
        ]
        base = options.base_image
        if base is None and any(wanted.needs_base for wanted in recipes):
            base = own_base(builder)
        for wanted in recipes:
            build_if_changed(builder, wanted, base, even_if_unchanged=options.rebuild)
    except ImageBuildError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\nimages: interrupted; finished images are kept, and the same command resumes the build", file=sys.stderr
        )
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="images/build", description="Builds RLJob's images with buildah or docker.")
    parser.add_argument(
        "image", nargs="*", default=NAMES, help=f"{', '.join(NAMES)} (default: all of these), {', '.join(EXAMPLES)}"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="device of the trainer image (default: cpu)")
    parser.add_argument(
        "--base-image",
        metavar="REFERENCE",
        help="image with Python 3.11 or newer and apt, such as python:3.12-slim "
        "(default: an image made by debootstrap if possible, otherwise the default of each Containerfile)",
    )
    parser.add_argument(
        "--builder",
        choices=["buildah", "docker"],
        help="program that builds the images (default: the first one that works)",
    )
    parser.add_argument(
        "--model-directory",
        type=Path,
        default=SMOLLM2,
        metavar="DIR",
        help="files of the model, in a folder …/REGISTRY/REPOSITORY/NAME/TAG (default: the model of `make model`)",
    )
    parser.add_argument("--check", action="store_true", help="only find the program that builds the images")
    parser.add_argument("--rebuild", action="store_true", help="build even if nothing changed")
    options = parser.parse_args(arguments)
    if unknown := set(options.image) - {*NAMES, *EXAMPLES}:
        parser.error(f"expected an image of {', '.join((*NAMES, *EXAMPLES))}, found {', '.join(sorted(unknown))}")
    return options


def own_base(builder: Builder) -> str | None:
    """The base image made by debootstrap, built if it is missing; None if this machine cannot build it."""
    tag = debian_base.tag()
    if builder.find(tag):
        return tag
    if not debian_base.is_possible():
        return None
    started = time.monotonic()
    with debian_base.prepared_recipe() as base:
        build(builder, base, labels={})
    report(builder, tag, f"built in {time.monotonic() - started:.0f} s")
    return tag


def build_if_changed(builder: Builder, wanted: Recipe, base: str | None, *, even_if_unchanged: bool) -> None:
    started = time.monotonic()
    wanted = with_base(with_provenance(wanted), base)
    key = content_key(wanted, base_id=base_id(builder, wanted, base))
    found = builder.find(wanted.tag)
    if found and found.labels.get(INPUTS_LABEL) == key and not even_if_unchanged:
        return report(builder, wanted.tag, "up to date")
    build(builder, wanted, labels={INPUTS_LABEL: key, **base_labels(builder, base_of(wanted, base))})
    report(builder, wanted.tag, f"built in {time.monotonic() - started:.0f} s")


def with_provenance(wanted: Recipe) -> Recipe:
    if wanted.context != REPOSITORY:
        return wanted
    origin = {
        "REVISION": revision(REPOSITORY, [wanted.containerfile, *input_files(wanted)]),
        "SOURCE": source(REPOSITORY),
    }
    return dataclasses.replace(wanted, arguments={**wanted.arguments, **origin})


def with_base(wanted: Recipe, base: str | None) -> Recipe:
    if base is None or not wanted.needs_base:
        return wanted
    return dataclasses.replace(wanted, arguments={**wanted.arguments, "BASE_IMAGE": base})


def base_id(builder: Builder, wanted: Recipe, base: str | None) -> str:
    """Id of the base image in the local store; empty if it is not there."""
    reference = base_of(wanted, base)
    local = builder.find(reference) if reference else None
    return local.id if local else ""


def base_of(wanted: Recipe, base: str | None) -> str | None:
    """The image that it is built on; None if its Containerfile decides."""
    return wanted.arguments.get("TRAINER_IMAGE") or (base if wanted.needs_base else None)


def base_labels(builder: Builder, reference: str | None) -> dict[str, str]:
    """The OCI labels that name the base image; its digest comes from `reference` itself, or from the local store."""
    if not reference:
        return {}
    name, _, digest = reference.partition("@")
    local = None if digest else builder.find(reference)
    labels = {"name": name, "digest": digest or (local.digest if local else "")}
    return {f"org.opencontainers.image.base.{key}": value for key, value in labels.items() if value}


def build(builder: Builder, wanted: Recipe, labels: dict[str, str]) -> None:
    with build_secrets(os.environ) as secrets:
        command = builder.build_command(wanted, labels, secrets)
        run_with_progress(wanted.name, command, step=builder.step, environment=builder.environment())


def report(builder: Builder, tag: str, what: str) -> None:
    image = builder.find(tag)
    size = image.size if image else "?"
    print(f"{tag:<48} {size:>8}  {what}", flush=True)
