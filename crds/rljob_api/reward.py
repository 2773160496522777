"""Reward functions: the user's, and the built-in ones with their arguments."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text
from rljob_api.environment import VariableName
from rljob_api.quantity import Bytes

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


def _regular_expression(pattern: str) -> str:
    if control := re.search(r"[\x00-\x08\x0b-\x1f]", pattern):
        raise _expected(
            f"a pattern in single quotes (in double quotes, YAML reads an escape sequence as the character "
            f"U+{ord(control[0]):04X})"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _expected(f"a Python regular expression ({error})") from None
    return pattern


def _with_one_group(pattern: str) -> str:
    if (groups := re.compile(_regular_expression(pattern)).groups) != 1:
        raise _expected(f"one group, such as in <answer>(.*?)</answer> (it has {groups}; write the others as (?:…))")
    return pattern


def _expected(description: str) -> PydanticCustomError:
    return PydanticCustomError("text", "{expected}", {"expected": description})


Pattern = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_regular_expression)]
PatternWithGroup = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_with_one_group)]
_Tag = Annotated[str, Text(pattern="^[A-Za-z_][A-Za-z0-9_-]*$", expected="the name of a tag, such as think")]
FieldName = Annotated[str, Field(min_length=1, max_length=253)]


class TaskRewardArgs(ApiModel):
    """The task's own reward: that of digits, or the verifier of a reasoning-gym data set."""


class ReferenceArgs(ApiModel):
    """Arguments of rewards that compare the answer with a reference answer."""

    answer_field: FieldName = "answer"
    """Field of the record with the reference answer, or with a list of them. Without it, the response is left out."""


class MathVerifyArgs(ReferenceArgs):
    """1 if the answer equals the reference answer as mathematics (1/2 and 0.5), by the package math-verify; 0
    otherwise. A response whose reference answer cannot be read is left out."""


class ExactMatchArgs(ReferenceArgs):
    """1 if the answer equals the reference answer, without surrounding white space; 0 otherwise."""

    ignore_case: bool = False
    """If true, upper and lower case are equal."""

    choices: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        default=None, min_length=2, max_length=64
    )
    """For multiple choice: the possible answers, such as [A, B, C, D]. The last of them in the answer counts."""


class RegexArgs(ApiModel):
    """1 if the response has a match of the pattern; 0 otherwise."""

    pattern: Pattern
    """Python regular expression. `.` also matches line ends."""

    whole_response: bool = False
    """If true, the pattern must match the whole response."""


class FormatArgs(ApiModel):
    """1 if the response has each tag once, as <think>…</think>, in this order and without text between; 0 otherwise."""

    tags: list[_Tag] = Field(default=["think", "answer"], min_length=1, max_length=16)
    """Names of the tags."""


class LengthArgs(ApiModel):
    """DAPO's penalty for long responses: 0 up to maxTokens - bufferTokens, then falling to -1 at maxTokens."""

    max_tokens: int = Field(ge=1, le=10_000_000)
    """Tokens from which a response gets -1, usually algorithm.maxResponseTokens."""

    buffer_tokens: int = Field(ge=1, le=10_000_000)
    """Tokens before maxTokens over which the penalty grows."""


class CodeArgs(ApiModel):
    """1 if the Python code in the response passes the tests of the record; 0 otherwise. The code is the last block
    between ```, or the answer. It runs in a process without network, other processes, and files outside a temporary
    directory. Without tests, the response is left out."""

    tests_field: FieldName = "tests"
    """Field of the record with Python code (assert …), a list of such texts, or a list of {input, output} for standard
    input and output."""

    partial: bool = False
    """If true, the reward is the share of tests that pass."""

    timeout_seconds: int = Field(default=5, ge=1, le=3600)
    """Maximum duration of all tests of one response, in seconds. Later tests fail."""

    memory: Bytes = 1 << 30
    """Maximum address space of the process, such as 1Gi."""


class ServerArgs(ApiModel):
    """Arguments of rewards that ask a server."""

    url: Annotated[str, Text(pattern=r"^https?://[^\s/]+\S*$", expected="an address, such as http://judge:8000/v1")]
    """Address of the server, without the path of the endpoint."""

    model: str = Field(min_length=1, max_length=253)
    """Name of the model in requests."""

    token_variable: VariableName | None = None
    """Environment variable with the token of the server; in pods, set it in spec.env from a Secret."""

    timeout_seconds: int = Field(default=20, ge=1, le=86400)
    """Maximum duration of a request, in seconds."""

    concurrency: int = Field(default=16, ge=1, le=1024)
    """Maximum number of requests at the same time."""

    retries: int = Field(default=3, ge=0, le=20)
    """Repetitions of a request that gets no reply, or one of the codes 408, 425, 429 and 5xx. The delay before the
    first is 0.5 s, and doubles. All of them count towards task.rewardTimeoutSeconds."""


class JudgeArgs(ServerArgs):
    """A score that a language model writes, from a server with OpenAI's chat completions (the url ends in /v1). A
    response whose reply has no score is left out."""

    prompt: Annotated[
        str, Text(pattern=r"\{response\}", expected="a string that contains {response}", max_length=65536)
    ]
    """Message for the judge. {prompt}, {response} and {answer} (the record's answer) are replaced."""

    score_pattern: PatternWithGroup = r"(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, which captures the score, a number. The last match in the reply counts."""

    max_tokens: int = Field(default=512, ge=1, le=1_000_000)
    """Maximum number of tokens of the reply."""


class RewardModelArgs(ServerArgs):
    """The score of a reward model on a vLLM server: the last number of its reply, without activation."""

    endpoint: Literal["Classify", "Pooling", "Score"] = "Classify"
    """Classify: models with a classification head, /classify. Pooling: models with scores of tokens, /pooling; the last
    token's counts. Score: cross-encoders, /score with prompt and response."""


BUILT_IN_REWARDS: dict[str, type[ApiModel]] = {
    "task": TaskRewardArgs,
    "exact_match": ExactMatchArgs,
    "math_verify": MathVerifyArgs,
    "regex": RegexArgs,
    "format": FormatArgs,
    "length": LengthArgs,
    "code": CodeArgs,
    "judge": JudgeArgs,
    "reward_model": RewardModelArgs,
}
"""Arguments of the built-in reward functions, by their names."""

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
        args = BUILT_IN_REWARDS.get(self.source)
        return args.model_validate(self.args, by_alias=True, by_name=False) if args else None

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
