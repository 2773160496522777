"""Losses and advantages of the user: loaded from the task's directory, tried first, and refused with their line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import BadInput
from rljob_trainer.algorithms.advantages import scored
from rljob_trainer.algorithms.functions import advantage_function, loss_function, own_code
from tests.unit.algorithm.test_advantage import batch_of

SOURCE = """
import torch

def plain(tokens, settings):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    return -tokens.advantages * ratio.clamp(max=1 + settings.clip_high)

def measured(tokens, settings):
    means = tokens.sequence_means(tokens.logprobs)
    return -tokens.advantages * tokens.logprobs, {"mean_logprob": means}

def summed(tokens, settings):
    return plain(tokens, settings).sum()

def detached(tokens, settings):
    return -tokens.advantages * tokens.logprobs.detach()

def stopped(tokens, settings):
    return 0 * tokens.logprobs

def not_finite(tokens, settings):
    return tokens.logprobs / 0

def infinite_gradient(tokens, settings):
    return (tokens.logprobs - tokens.logprobs.detach()).sqrt()

def raising(tokens, settings):
    return tokens.logprob  # misspelt

def nothing(tokens, settings):
    pass

def badly_measured(tokens, settings):
    return plain(tokens, settings), {"kl": 0.5}

def sometimes_measured(tokens, settings):
    return plain(tokens, settings), {"gate": tokens.logprobs} if len(tokens.lengths) else {}

def of_the_reward(answer):
    return 0.0

def of_long_ones(tokens, settings):
    return plain(tokens, settings) / tokens.logprobs.detach().abs().max()

def ranks(groups, settings):
    return groups.rewards.argsort(axis=1).argsort(axis=1) - 1.0

def flat(groups, settings):
    return groups.rewards.reshape(-1)

def divided(groups, settings):
    return groups.rewards / (groups.rewards - groups.rewards)

def absent(groups, settings):
    return groups.reward
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    finders = list(sys.meta_path)
    (tmp_path / "own_losses.py").write_text(SOURCE)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("own_losses", None)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if text in line)


def algorithm(**functions: str) -> AlgorithmSpec:
    return AlgorithmSpec(steps=1, group_size=3, **functions)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plain", "measured"])
def test_a_loss_of_the_user_is_loaded(directory: Path, name: str) -> None:
    assert loss_function(algorithm(loss=f"own_losses:{name}"), directory).__name__ == name


@pytest.mark.parametrize(
    ("name", "expected", "line"),
    [
        ("summed", "as a tensor of [5], one value for each token, found one of []", "def summed"),
        ("detached", "expected a loss with a gradient", "def detached"),
        ("stopped", "expected a loss with a gradient", "def stopped"),
        ("not_finite", "expected a finite loss", "def not_finite"),
        ("infinite_gradient", "expected a finite gradient", "def infinite_gradient"),
        ("raising", "raised AttributeError: 'Tokens' object has no attribute 'logprob'", "# misspelt"),
        ("nothing", "found None", "def nothing"),
        ("badly_measured", "expected the metric kl from", "def badly_measured"),
        ("sometimes_measured", "expected the same metrics", "def sometimes_measured"),
        ("of_the_reward", "expected of_the_reward(tokens, settings)", "def of_the_reward"),
        ("of_long_ones", "raised", "tokens.logprobs.detach().abs().max()"),  # of a micro-batch without tokens
        ("missing", "expected a function missing in", None),
    ],
)
def test_a_wrong_loss_is_refused_at_the_start_with_its_line(
    directory: Path, name: str, expected: str, line: str | None
) -> None:
    with pytest.raises(BadInput) as refused:
        loss_function(algorithm(loss=f"own_losses:{name}"), directory)
    assert expected in str(refused.value)
    if line is not None:
        assert f"{directory / 'own_losses.py'}, line {line_of(line.strip())}" in str(refused.value)


def test_an_advantage_of_the_user_is_used(directory: Path) -> None:
    own = algorithm(advantage="own_losses:ranks")
    function = advantage_function(own, directory)
    batch = batch_of([1, 1, 1], 3, kept=[True, True, False])
    found = scored(batch, np.asarray([5, 9, 1], np.float32), function, own.settings)
    assert found.advantages.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flat", "expected an array of [prompts, group size] = [2, 3]"),
        ("divided", "expected finite advantages"),
        ("absent", "raised AttributeError: 'Groups' object has no attribute 'reward'"),
    ],
)
def test_a_wrong_advantage_is_refused_at_the_start(directory: Path, name: str, expected: str) -> None:
    with pytest.raises(BadInput) as refused, np.errstate(all="ignore"):
        advantage_function(algorithm(advantage=f"own_losses:{name}"), directory)
    assert expected in str(refused.value)
    assert f"{directory / 'own_losses.py'}, line " in str(refused.value)


def test_the_code_of_the_users_functions_is_an_input(directory: Path) -> None:
    package = directory / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    both = algorithm(loss="own_losses:plain", advantage="parts:advantage")
    assert own_code(both, directory) == {"own_losses.py": SOURCE.encode(), "parts/__init__.py": b""}
    assert own_code(algorithm(loss="numpy:sum"), directory) == {}
