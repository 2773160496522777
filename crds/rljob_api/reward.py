"""Reward functions: the user's and the built-in ones."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text
from rljob_api.built_in_rewards import BUILT_IN_REWARDS

FUNCTION_PATTERN = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"

PythonFunction = Annotated[
    str,
    Text(pattern=f"^{FUNCTION_PATTERN}$", expected="a Python function as module:function, such as rewards:exact_match"),
]


def module_rule(field: str) -> Rule:
    """A rule that refuses the name of a file in the Python function `field`."""
    return Rule(
        cel=f"!self.{field}.contains('.py:')",
        holds=lambda spec: ".py:" not in (getattr(spec, field) or ""),
        field=field,
        message="must name a module, not a file: write the module without .py, such as rewards:exact_match",
    )


_NAMES = ", ".join(BUILT_IN_REWARDS)
_LABEL = Text(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", expected="a name of letters, digits, _, - and .", max_length=63)
_FUNCTION = Text(
    pattern=f"^({'|'.join(BUILT_IN_REWARDS)}|{FUNCTION_PATTERN})$",
    expected=f"{_NAMES}, or a Python function as module:function",
)


def _did_you_mean(reward: RewardSpec) -> str:
    close = get_close_matches(reward.name or "", BUILT_IN_REWARDS, n=1)
    return f"; did you mean {close[0]}?" if close else ""


class RewardSpec(ApiModel):
    """A reward function."""

    name: Annotated[str, _LABEL] | None = None
    """Name in metrics. Absent: the name of the function. Without `function`, it names a built-in reward function."""

    function: Annotated[str, _FUNCTION] | None = None
    """A Python function as module:function, or a built-in reward function."""

    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this reward in the sum."""

    batch: bool | None = None
    """If true, the Python function receives all responses to a prompt as lists, and returns a list, as in TRL. Absent:
    true if it has a parameter `completions` or `prompts`, or only **kwargs."""

    args: FreeForm = Field(default_factory=dict)
    """Arguments: keyword arguments of a Python function, or those of the built-in reward function."""

    rules: ClassVar[tuple[Rule, ...]] = (
        module_rule("function"),
        Rule(
            cel=f"has(self.function) || (has(self.name) && self.name in {list(BUILT_IN_REWARDS)})",
            holds=lambda reward: reward.function is not None or reward.name in BUILT_IN_REWARDS,
            field="name",
            message=f"expected function: module:function, or the name of a built-in reward function: {_NAMES}",
            hint=_did_you_mean,
        ),
    )

    @property
    def source(self) -> str:
        """`module:function`, or the name of a built-in reward function."""
        return self.function or self.name or ""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.source.rpartition(":")[2]

    def typed_args(self) -> Any:
        """The validated arguments of a built-in reward function; None for a Python function."""
        row = BUILT_IN_REWARDS.get(self.source)
        return row.args.model_validate(self.args, by_alias=True, by_name=False) if row else None

    def further_problems(self) -> list[InitErrorDetails]:
        if self.batch is not None and self.source in BUILT_IN_REWARDS:
            return [conflict("batch", "is for Python functions only: remove it")]
        try:
            self.typed_args()
        except ValidationError as error:
            return [error_in_args(detail) for detail in error.errors(include_url=False)]
        return []


def error_in_args(detail: ErrorDetails) -> InitErrorDetails:
    """The error about a value of `args`, as one of the object that contains them."""
    kind, context = detail["type"], detail.get("ctx", {})
    own = PydanticCustomError(kind, detail["msg"], context) if kind in ("text", "conflict") else kind
    return InitErrorDetails(type=own, loc=("args", *detail["loc"]), input=detail["input"], ctx=context)


def conflict(field: str, message: str) -> InitErrorDetails:
    """A conflict between fields that no rule can express."""
    return InitErrorDetails(
        type=PydanticCustomError("conflict", "{message}", {"message": message}), loc=(field,), input=None
    )
