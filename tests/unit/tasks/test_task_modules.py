"""Modules next to the manifest are imported for the task, shadow no other, and may forbid stale rollouts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks.python_functions import load_function
from rljob_trainer.tasks.task_modules import load_module, require_staleness_allowed


@pytest.fixture(autouse=True)
def _imports_stay_as_they_were() -> Iterator[None]:
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield
    assert sys.path == path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(directory: Path, **sources: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name, source in sources.items():
        (directory / f"{name}.py").write_text(source, encoding="utf-8")
    return directory


BROKEN = "raise SystemError('it shadows another module')\n"
REWARD = """
import logging, numbers, pickle, types
import yaml
import helper_of_task
def reward(answer, record):
    import later_of_task
    return helper_of_task.ONE + later_of_task.ONE
"""


def test_unrelated_files_shadow_neither_libraries_nor_the_standard_library(tmp_path: Path) -> None:
    names = ("numbers", "token", "types", "logging", "secrets", "queue", "yaml", "numpy", "datasets")
    write(tmp_path, **dict.fromkeys(names, BROKEN))
    (tmp_path / "clearml").mkdir()
    write(tmp_path, helper_of_task="ONE = 1\n", later_of_task="ONE = 1\n", rewards_of_task=REWARD)
    program = (
        "import sys; from pathlib import Path\n"
        "from rljob_trainer.tasks.python_functions import load_function\n"
        f"reward = load_function('rewards_of_task:reward', Path({str(tmp_path)!r}))\n"
        "assert reward('', {}) == 2\n"
        "import secrets, queue, token, importlib.util\n"
        "assert importlib.util.find_spec('clearml') is None, 'a folder of data is no package'\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_package_with_its_own_modules_can_be_named(tmp_path: Path) -> None:
    package = write(tmp_path / "package_of_task", __init__="", scores="from .parts import f\n", parts="def f(): ...\n")
    assert load_module("package_of_task.scores:f", tmp_path).__file__ == str(package / "scores.py")
    (tmp_path / "folder_of_task").mkdir()
    folder = write(tmp_path / "folder_of_task" / "inner", scores="def f(): ...\n")
    assert load_module("folder_of_task.inner.scores:f", tmp_path).__file__ == str(folder / "scores.py")


def test_the_same_name_in_another_directory_is_another_module(tmp_path: Path) -> None:
    for number in (1, 2):
        write(
            tmp_path / str(number), twice_of_task="from sibling_of_task import N\n", sibling_of_task=f"N = {number}\n"
        )
    assert load_module("twice_of_task:N", tmp_path / "1").N == 1
    del sys.modules["sibling_of_task"]
    assert load_module("twice_of_task:N", tmp_path / "2").N == 2


def test_a_folder_of_data_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()
    assert "site-packages" in str(load_module("yaml:safe_load", tmp_path).__file__)


@pytest.mark.parametrize("name", ["numbers", "types", "sys", "yaml", "rljob_trainer"])
def test_a_named_module_that_exists_twice_is_refused_with_both(name: str, tmp_path: Path) -> None:
    write(tmp_path, **{name: "def reward(answer, record):\n    return 0\n"})
    with pytest.raises(BadInput, match=rf"expected one module {name}, found {tmp_path}/{name}.py and .*; rename"):
        load_module(f"{name}:reward", tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(2)\n", r"it called sys\.exit\(2\); put what it runs as a program under if __name__"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt; correct that module"),
        ("raise BaseException('\\ud83d')\n", r"BaseException: \\ud83d; correct"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E\n", r"E: \(an error without text\)"),
        (
            "from yaml import reward\n",
            r"ImportError: .*; yaml is .*/yaml/__init__\.py, not .*/yaml\.py: rename that file",
        ),
        ("import yaml\nyaml.reward\n", r"AttributeError: .*not .*/yaml\.py: rename that file"),
        ("import no_such_module\n", r"expected no_such_module\.py in .* or an installed module"),
        ("def other(): ...\n", r"expected a function f in .*broken_of_task\.py"),
        ("def f(:\n", "SyntaxError: "),
        ("def __getattr__(name):\n    raise SystemExit(1)\n", r"the module broken_of_task called sys\.exit\(1\)"),
        ("x = '\0'\n", "cannot import broken_of_task"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_the_cause(source: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, broken_of_task=source, yaml="def reward(answer, record): ...\n")
    with pytest.raises(BadInput, match=message):
        load_function("broken_of_task:f", tmp_path)
    with pytest.raises(BadInput, match=r"cannot import absent_of_task .* expected absent_of_task\.py in"):
        load_function("absent_of_task:f", tmp_path)


# --- MAX_STALENESS ---

MODULES = {
    "forbids": "MAX_STALENESS = 0\n",
    "allows": "MAX_STALENESS = 1\n",
    "declares_nothing": "",
    "declares_text": "MAX_STALENESS = '0'\n",
    "declares_truth": "MAX_STALENESS = False\n",
    "declares_less": "MAX_STALENESS = -1\n",
    "fails": "1 / 0\n",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sources = {name: f"{source}def items(): ...\ndef reward(answer, record): ...\n" for name, source in MODULES.items()}
    return write(tmp_path, **sources)


def job(name: str, reward: str | None, **algorithm: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"uri": "hf://org/name"},
            "topology": "Disaggregated",
            "task": {"name": name} | ({"reward": reward} if reward else {}),
            "algorithm": {"steps": 1, "maxStaleness": 1} | algorithm,
        }
    )


@pytest.mark.parametrize(
    ("name", "reward", "by"),
    [
        ("forbids:items", "declares_nothing:reward", "forbids (task.name)"),
        ("allows:items", "forbids:reward", "forbids (task.reward)"),
        ("digits", "forbids:reward", "forbids (task.reward)"),
    ],
)
def test_each_module_of_the_task_can_forbid_stale_rollouts(directory: Path, name: str, reward: str, by: str) -> None:
    with pytest.raises(BadInput) as raised:
        require_staleness_allowed(job(name, reward), directory)
    assert str(raised.value) == (
        f"algorithm.maxStaleness: expected at most 0, because {by} sets MAX_STALENESS = 0, found 1; "
        "write algorithm: {maxStaleness: 0}, or change the task"
    )
    require_staleness_allowed(job(name, reward, maxStaleness=0), directory)


def test_the_advice_for_partial_rollouts_is_a_valid_manifest(directory: Path) -> None:
    with pytest.raises(BadInput, match=r"write algorithm: {maxStaleness: 0, partialRolloutPrompts: 0}, or"):
        require_staleness_allowed(job("digits", "forbids:reward", partialRolloutPrompts=2), directory)


@pytest.mark.parametrize(
    ("name", "reward"),
    [("digits", None), ("allows:items", "allows:reward"), ("declares_nothing:items", "allows:reward")],
)
def test_other_tasks_allow_stale_rollouts(directory: Path, name: str, reward: str | None) -> None:
    require_staleness_allowed(job(name, reward), directory)


@pytest.mark.parametrize("module", ["declares_text", "declares_truth", "declares_less"])
def test_a_limit_that_is_no_whole_number_is_refused(directory: Path, module: str) -> None:
    with pytest.raises(BadInput, match=f"expected MAX_STALENESS in {module} to be a whole number from 0, found "):
        require_staleness_allowed(job("digits", f"{module}:reward"), directory)


def test_without_stale_rollouts_no_module_is_imported(directory: Path) -> None:
    require_staleness_allowed(job("digits", "fails:reward", maxStaleness=0), directory)
    with pytest.raises(BadInput, match="cannot import fails"):
        require_staleness_allowed(job("digits", "fails:reward"), directory)
