"""The key of an image changes only with the inputs of the image."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from image_build.inputs import content_key, input_files
from image_build.recipes import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    context = tmp_path / "context"
    (context / "part" / "__pycache__").mkdir(parents=True)
    (context / "part" / "code.py").write_text("one = 1\n")
    (context / "part" / "__pycache__" / "code.pyc").write_text("compiled")
    (context / "lock.txt").write_text("a==1\n")
    (context / "notes.md").write_text("unrelated\n")
    containerfile = tmp_path / "Containerfile"
    containerfile.write_text("FROM scratch\nCOPY part lock.txt /\n")
    ignore = tmp_path / "Containerfile.dockerignore"
    ignore.write_text("# kept\n*\n!lock.txt\n!part\n**/__pycache__\n")
    return Recipe("image", "localhost/image:1", containerfile, context, ignore, arguments={"VERSION": "1"})


def key(recipe: Recipe, base_id: str = "base") -> str:
    return content_key(recipe, base_id)


def test_the_ignore_file_selects_the_files(recipe: Recipe) -> None:
    assert [str(path.relative_to(recipe.context)) for path in input_files(recipe)] == ["lock.txt", "part/code.py"]


def test_without_an_ignore_file_every_file_counts(recipe: Recipe) -> None:
    assert len(input_files(dataclasses.replace(recipe, ignore=None))) == 4


@pytest.mark.parametrize("touch", ["notes.md", "part/__pycache__/code.pyc"])
def test_files_that_are_left_out_do_not_change_the_key(recipe: Recipe, touch: str) -> None:
    before = key(recipe)
    (recipe.context / touch).write_text("other")
    assert key(recipe) == before


def test_times_and_the_place_of_the_checkout_do_not_change_the_key(recipe: Recipe, tmp_path: Path) -> None:
    before = key(recipe)
    os.utime(recipe.context / "lock.txt", (1, 1))
    moved = recipe.context.rename(tmp_path / "elsewhere")
    assert key(dataclasses.replace(recipe, context=moved)) == before


def test_content_name_and_mode_of_each_file_change_the_key(recipe: Recipe) -> None:
    code = recipe.context / "part" / "code.py"
    keys = [key(recipe)]
    code.write_text("one = 2\n")
    keys.append(key(recipe))
    code.chmod(0o755)
    keys.append(key(recipe))
    code.rename(code.with_name("other.py"))
    keys.append(key(recipe))
    code.with_name("added.py").write_text("")
    keys.append(key(recipe))
    assert len(set(keys)) == len(keys)


def test_containerfile_arguments_and_base_change_the_key(recipe: Recipe) -> None:
    keys = [
        key(recipe),
        key(recipe, base_id="other"),
        key(dataclasses.replace(recipe, arguments={"VERSION": "2"})),
    ]
    recipe.containerfile.write_text("FROM scratch\nCOPY lock.txt /\n")
    keys.append(key(recipe))
    assert len(set(keys)) == len(keys)
