"""The built-in reward functions: one row for each name, with the model of its arguments.

To add one, add the model and a row, and the function of that name to a module of `rljob_trainer.rewards`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rljob_api.api_model import ApiModel, Text
from rljob_api.environment import VariableName
from rljob_api.quantity import Bytes


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
    """The task's own reward, such as that of digits, or the verifier of a reasoning-gym data set."""


class ReferenceArgs(ApiModel):
    """Arguments of rewards that compare the answer with a reference answer."""

    answer_field: FieldName = "answer"
    """Field of the record with the reference answer, or with a list of them. Without it, the response is left out."""


class MathVerifyArgs(ReferenceArgs):
    """1 if the answer equals the reference answer as mathematics (1/2 and 0.5), by the package math-verify of
    rljob-trainer[data]; 0 otherwise, and if that takes too long. A response whose reference answer cannot be read is
    left out."""


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
    """1 if the response has each tag once, as `<think>…</think>`, in this order and without text between; 0
    otherwise."""

    tags: list[_Tag] = Field(default=["think", "answer"], min_length=1, max_length=16)
    """Names of the tags."""


class LengthArgs(ApiModel):
    """DAPO's penalty for long responses: 0 up to maxTokens - bufferTokens, then falling to -1 at maxTokens."""

    max_tokens: int = Field(ge=1, le=10_000_000)
    """Tokens from which a response gets -1, usually algorithm.maxResponseTokens."""

    buffer_tokens: int = Field(ge=1, le=10_000_000)
    """Tokens before maxTokens over which the penalty grows."""


class RepetitionArgs(ApiModel):
    """Penalty for repetition, as in TRL: minus the share of the n-grams of tokens that occur earlier in the response,
    between 0 and -1."""

    ngram_size: int = Field(default=3, ge=1, le=1000)
    """Number of tokens of an n-gram. A response with fewer tokens gets 0."""


class CodeArgs(ApiModel):
    """1 if the Python code in the response passes the tests of the record; 0 otherwise. The code is the last fenced
    block, or the answer. It runs in a process without network, other processes, and files outside a temporary
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


class BuiltInReward(NamedTuple):
    """A built-in reward function, described by the docstring of its arguments."""

    args: type[ApiModel]

    module: str = ""
    """Module of `rljob_trainer.rewards` with the function. Empty: it is the task's."""

    compares: bool = False
    """True if it compares the response with the reference answer, which it should therefore reward."""

    remote: bool = False
    """True if it asks a server."""

    bounded: bool = False
    """True if a response may exceed the time or memory of the process, and then gets 0: it is no error."""


BUILT_IN_REWARDS: dict[str, BuiltInReward] = {
    "task": BuiltInReward(TaskRewardArgs),
    "exact_match": BuiltInReward(ExactMatchArgs, "text", compares=True),
    "math_verify": BuiltInReward(MathVerifyArgs, "mathematics", compares=True, bounded=True),
    "regex": BuiltInReward(RegexArgs, "text"),
    "format": BuiltInReward(FormatArgs, "text"),
    "length": BuiltInReward(LengthArgs, "text"),
    "repetition": BuiltInReward(RepetitionArgs, "text"),
    "code": BuiltInReward(CodeArgs, "code", bounded=True),
    "judge": BuiltInReward(JudgeArgs, "servers", remote=True),
    "reward_model": BuiltInReward(RewardModelArgs, "servers", remote=True),
}
