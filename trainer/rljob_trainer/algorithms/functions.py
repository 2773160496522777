"""The functions of a job's algorithm: those of its row, or the user's own, which are tried on made-up data first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.algorithms import ALGORITHMS, AlgorithmSettings
from rljob_client.errors import BadInput
from rljob_trainer.algorithms import advantages
from rljob_trainer.algorithms.advantages import AdvantageFunction, Groups, Values
from rljob_trainer.tasks.python_functions import load_function
from rljob_trainer.tasks.user_code import short_repr, user_code

if TYPE_CHECKING:
    from rljob_trainer.algorithms.tokens import LossFunction, Tokens


def advantage_function(algorithm: AlgorithmSpec, directory: Path) -> AdvantageFunction:
    """The advantage of the job. `directory`: that of the task's Python modules.

    Raises `BadInput` if a function of the user cannot be loaded, fails or returns something else; later, also in steps.
    """
    if algorithm.advantage is None:
        function: AdvantageFunction = getattr(advantages, ALGORITHMS[algorithm.name].advantage)
        return function
    own, subject = _loaded(algorithm.advantage, directory, "groups")

    def checked(groups: Groups, settings: AlgorithmSettings) -> Values:
        with user_code(subject):
            values = np.asarray(own(groups, settings), np.float64)
        if values.shape != groups.rewards.shape:
            raise BadInput(
                f"expected an array of [prompts, group size] = {list(groups.rewards.shape)} from {subject}, "
                f"found one of {list(values.shape)}; return the advantage of each response"
            )
        return values

    rewards = np.arange(2 * algorithm.group_size, dtype=np.float64).reshape(2, -1) % 3
    groups = Groups(rewards, np.ones_like(rewards, np.bool_), np.full_like(rewards, 5, np.int64))
    if not np.isfinite(values := checked(groups, algorithm.settings)).all():
        raise BadInput(
            f"expected finite advantages from {subject} for the rewards {rewards.tolist()}, "
            f"found {short_repr(values.tolist())}; correct the function"
        )
    return checked


def loss_function(algorithm: AlgorithmSpec, directory: Path) -> LossFunction:
    """The loss of the job. `directory`: that of the task's Python modules. Imports torch.

    Raises `BadInput` if a function of the user cannot be loaded, fails, or returns a loss that has another shape, is
    not finite or has no gradient.
    """
    from rljob_trainer.algorithms import losses

    if algorithm.loss is None:
        function: LossFunction = getattr(losses, ALGORITHMS[algorithm.name].loss)
        return function
    own, subject = _loaded(algorithm.loss, directory, "tokens")
    some, none = (_try_loss(own, algorithm.settings, lengths, subject) for lengths in ([3, 2], []))
    if some != none:
        raise BadInput(
            f"expected the same metrics from {subject} for every micro-batch, found {some}, and {none} without tokens; "
            "return them always"
        )
    return own


def own_code(algorithm: AlgorithmSpec, directory: Path) -> dict[str, bytes]:
    """The files of the modules with functions of the user, by name. Those of installed packages are left out."""
    references = [each for each in (algorithm.loss, algorithm.advantage) if each is not None]
    stems = [directory / reference.partition(":")[0].replace(".", "/") for reference in references]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in sorted(files)}


def _loaded(reference: str, directory: Path, argument: str) -> tuple[Callable[..., Any], str]:
    """The user's function of `argument` and settings, and its description for messages, with file and line."""
    own = load_function(reference, directory)
    code = getattr(inspect.unwrap(own), "__code__", None)
    place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
    try:
        inspect.signature(own).bind(None, None)
    except TypeError as error:
        name = reference.partition(":")[2]
        found = f"found {name}{inspect.signature(own)}: {error}"
        raise BadInput(f"expected {name}({argument}, settings) in {reference}{place}, {found}") from None
    except ValueError:
        pass  # a builtin without a signature
    return own, f"the {'loss' if argument == 'tokens' else 'advantage'} function {reference}{place}"


def _try_loss(own: Callable[..., Any], settings: AlgorithmSettings, lengths: list[int], subject: str) -> list[str]:
    """Call `own` with responses of these `lengths`, and check the result. Returns the names of its metrics."""
    import torch

    tokens = _made_up_tokens(lengths)
    with user_code(subject):
        result = own(tokens, settings)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        named = {"the loss": loss, **{f"the metric {name}": value for name, value in metrics.items()}}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or value.shape != tokens.logprobs.shape:
            found = f"one of {list(value.shape)}" if isinstance(value, torch.Tensor) else short_repr(value)
            raise BadInput(
                f"expected {name} from {subject} as a tensor of [{sum(lengths)}], one value for each token, found "
                f"{found}; return it without sum or mean, which RLJob takes over all micro-batches"
            )
    gradient = None
    if loss.requires_grad:
        with user_code(subject):
            [gradient] = torch.autograd.grad(loss.sum(), [tokens.logprobs], allow_unused=True)
    if lengths and (gradient is None or not gradient.any()):
        raise BadInput(
            f"expected a loss with a gradient from {subject}, found none: compute it from tokens.logprobs, without "
            "detach, item or no_grad"
        )
    for name, values in (("loss", loss), ("gradient", gradient)):
        if values is not None and not torch.isfinite(values).all():
            found = short_repr(values.tolist())
            raise BadInput(f"expected a finite {name} from {subject}, found {found}; correct the function")
    return list(metrics)


def _made_up_tokens(lengths: list[int]) -> Tokens:
    """Tokens of responses of these `lengths`, the first with a positive advantage, the second with a negative one."""
    import torch

    from rljob_trainer.algorithms.tokens import Tokens

    old = -1 - torch.linspace(0, 1, sum(lengths))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    return Tokens(
        logprobs=(0.95 * old).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old + 0.01,
        advantages=1.0 - 2.0 * (sequence % 2),
        kept=torch.ones_like(sequence, dtype=torch.bool),
        sequence=sequence,
        lengths=lengths,
    )
