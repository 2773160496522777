"""Data, reward code and model files are recognized by their digests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rljob_api.task import TaskSpec
from rljob_trainer.runtime.run_inputs import changed_inputs, data_digest, model_digests, run_inputs
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.task import Item, Task


class PlainTokenizer:
    chat_template = None


def items(*questions: str) -> list[Item]:
    return [Item(question, {"prompt": question}) for question in questions]


def model(directory: Path, weights: float = 0.0) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    values = np.zeros(1_000_000, np.float32)
    values[::10_000] = weights
    save_file({"layer.weight": values}, directory / "model.safetensors")
    return directory


class JobWithReward:
    """A job whose reward is in the module `name` of a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        spec = TaskSpec.model_validate({"name": "digits", "reward": f"{name}:reward"})
        self._source = RewardSource(spec, directory, 0)
        self._task = Task("digits", items("a"), self._source.load(), PromptFormat(PlainTokenizer()), 8, 0)
        self._model = model(directory / "model")

    @property
    def inputs(self) -> dict[str, Any]:
        return run_inputs(self._task, self._source, self._model)


def test_the_order_the_number_and_the_records_of_items_count() -> None:
    whole = data_digest(items("a", "b"))
    assert whole == data_digest(items("a", "b"))
    assert whole["items"] == 2
    others = [items("b", "a"), items("a", "b", "c"), items("a"), [Item("a", {}), Item("b", {})]]
    assert len({data_digest(each)["sha256"] for each in others} | {whole["sha256"]}) == 5


def test_records_with_any_values_have_a_repeatable_digest() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    def digest() -> Any:
        values = (deep, 10**5000, "\ud83d", float("nan"), object(), np.zeros(2))
        return data_digest([Item("a\ud83d", {"x": value}) for value in values])

    assert digest() == digest()


def test_a_source_that_computes_its_items_is_compared_by_its_first_ones() -> None:
    class Huge:
        def __len__(self) -> int:
            return 2**31 - 1

        def __getitem__(self, index: int) -> Item:
            assert index < 1000
            return Item(str(index), {})

    assert data_digest(Huge())["items"] == 2**31 - 1


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_changed_file_of_the_model_is_named(changed: str, tmp_path: Path) -> None:
    before = model_digests(model(tmp_path / "model"))
    if changed == "model.safetensors":
        model(tmp_path / "model", weights=1.0)
    else:
        (tmp_path / "model" / changed).write_text("{}")
    after = model_digests(tmp_path / "model")
    assert changed_inputs({"model": before}, {"model": after}) == [f"model ({changed})"]


def test_a_changed_module_of_the_reward_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for version in ("..1", "..2"):  # as kubelet mounts a ConfigMap
        (tmp_path / version).mkdir()
        (tmp_path / version / "helper_of_inputs.py").write_text("OFFSET = 1\n")
    link = tmp_path / "helper_of_inputs.py"
    link.symlink_to(tmp_path / "..1" / link.name)
    (tmp_path / "reward_of_inputs.py").write_text(
        "from helper_of_inputs import OFFSET\ndef reward(answer, record):\n    return OFFSET\n"
    )
    job = JobWithReward(tmp_path, "reward_of_inputs")
    before = job.inputs
    assert set(before["reward code"]) == {"helper_of_inputs.py", "reward_of_inputs.py"}
    link.unlink()
    link.symlink_to(tmp_path / "..2" / link.name)
    assert changed_inputs(before, job.inputs) == []
    link.write_text("OFFSET = 2\n")
    assert changed_inputs(before, job.inputs) == ["reward code (helper_of_inputs.py)"]


def test_inputs_that_were_not_recorded_do_not_count() -> None:
    assert changed_inputs({}, {"data": {"items": 1, "sha256": "x"}}) == []
    recorded = {"data": {"items": 1_000, "sha256": "x"}}
    assert changed_inputs(recorded, {"data": {"items": 999, "sha256": "y"}}) == ["data (1,000 items, now 999)"]


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("# checked\ndef reward(answer,  record):\n    return (1)  # always\n", False),
        ("def reward(answer, record):\n    return 2\n", True),
        ('"""Rewards."""\ndef reward(answer, record):\n    return 1\n', True),
        ("def reward(answer, record)\n", True),
    ],
)
def test_comments_and_formatting_of_the_reward_do_not_count(source: str, counts: bool, tmp_path: Path) -> None:
    file = tmp_path / "commented_reward.py"
    file.write_text("def reward(answer, record):\n    return 1\n")
    job = JobWithReward(tmp_path, "commented_reward")
    before = job.inputs
    file.write_text(source)
    named = ["reward code (commented_reward.py)"]
    assert changed_inputs(before, job.inputs) == (named if counts else [])
    earlier_version = {name: digests for name, digests in before.items() if name != "reward syntax"}
    assert changed_inputs(earlier_version, job.inputs) == named
