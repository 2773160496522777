"""The training algorithm and its hyperparameters."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.alias_generators import to_camel
from pydantic_core import InitErrorDetails, PydanticCustomError

from rljob_api.algorithms import ALGORITHMS, AlgorithmName, AlgorithmSettings, LossAggregation, ScaleAdvantages
from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable, only_raised
from rljob_api.reward import PythonFunction, module_rule


class ImportanceSamplingSpec(ApiModel):
    """Correction for the difference between the token probabilities of the engine and of the policy."""

    mode: Literal["Truncate", "Mask", "Disabled"] = "Truncate"
    """Truncate: weight each token by min(ratio, cap), where ratio is its probability under the policy divided by its
    probability under the engine. Mask: weight it by the ratio, and drop it if the ratio is above cap or below 1/cap.
    Disabled: no correction."""

    cap: float = Field(default=2.0, gt=1, le=1000)
    """Bound on the ratio of probabilities."""

    level: Literal["Token", "Sequence"] = "Token"
    """Token: each token has its own ratio. Sequence: all tokens of a response have the product of their ratios, which
    is unbiased but varies more."""


class LearningRateSchedule(ApiModel):
    """Course of the learning rate after the warm-up, as a function of the step: a schedule of transformers."""

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "constant"
    """Name of the schedule, as lr_scheduler_type of transformers. A schedule other than constant and inverse_sqrt ends
    at algorithm.steps, which then cannot change."""

    args: FreeForm = Field(default={})
    """Arguments of the schedule, as lr_scheduler_kwargs of transformers: min_lr_rate of cosine_with_min_lr, num_cycles
    of cosine_with_restarts, power and lr_end of polynomial, num_decay_steps of warmup_stable_decay. constant has
    none."""

    def further_problems(self) -> list[InitErrorDetails]:
        if self.name != "constant" or not self.args:
            return []
        problem = PydanticCustomError("text", "{expected}", {"expected": "no arguments for the schedule constant"})
        return [InitErrorDetails(type=problem, loc=("args",), input=self.args)]


_ENDLESS_SCHEDULES = ("constant", "inverse_sqrt")
"""Schedules whose rate does not depend on the number of steps."""

STEPS_OF_SCHEDULE = {
    "rule": f"self.algorithm.learningRateSchedule.name in {list(_ENDLESS_SCHEDULES)} || "
    "self.algorithm.steps == oldSelf.algorithm.steps",
    "message": "cannot change with a learning rate schedule that ends at the last step, because it would change the "
    "rates of past steps: create another job",
    "fieldPath": ".algorithm.steps",
}
"""Rule of the spec about changes of the number of steps."""


def _reading_rule(setting: str) -> Rule:
    """A rule that refuses the setting with algorithms that do not read it."""
    names = [name for name, row in ALGORITHMS.items() if setting in row.unread]
    return Rule(
        cel=f"!has(self.{to_camel(setting)}) || !(self.name in {names})",
        holds=lambda algorithm: getattr(algorithm, setting) is None or algorithm.name not in names,
        field=to_camel(setting),
        message=f"is not read by {', '.join(names)}: remove it, or write another name",
    )


class DynamicSamplingSpec(ApiModel):
    """DAPO's dynamic sampling: a group whose rewards are all equal teaches nothing, so it is replaced by a group of
    responses to a further prompt."""

    max_rounds: int = Field(default=10, ge=2, le=1000)
    """Maximum rounds of generation in a step. The first has promptsPerStep prompts, and each further one about as many
    as are needed to replace the groups without a difference. If they do not suffice, such groups fill up the step."""


class OverlongPenaltySpec(ApiModel):
    """DAPO's soft punishment of long responses, which is added to their reward. It grows from 0, at maxResponseTokens -
    bufferTokens, to -factor at maxResponseTokens."""

    buffer_tokens: int = Field(ge=1, le=1_000_000)
    """Number of tokens before maxResponseTokens in which the penalty grows."""

    factor: float = Field(default=1.0, gt=0, le=1e6)
    """Penalty of the longest responses."""


StopString = Annotated[
    str, Text(pattern=r"^[\s\S]+$", expected="the text that ends a response, such as </answer>", max_length=256)
]


class AlgorithmSpec(ApiModel):
    """The training algorithm and its hyperparameters. Only `steps` is required. Only `steps` and `maxPromptTokens` can
    change after the job is created."""

    name: AlgorithmName = Field(
        default="grpo",
        description="Algorithm: advantages, loss, and defaults of the settings that it reads. "
        + ". ".join(f"{name}: {row.summary}" for name, row in ALGORITHMS.items())
        + ".",
        json_schema_extra=immutable(),
    )

    loss: PythonFunction | None = Field(default=None, json_schema_extra=immutable())
    """Python function that replaces the loss of the algorithm, as module:function. It receives the tokens of a
    micro-batch and returns the loss of each. The module is in the manifest's directory (in pods, in task.files) or in
    an installed package."""

    advantage: PythonFunction | None = Field(default=None, json_schema_extra=immutable())
    """Python function that replaces the advantage of the algorithm, as module:function. It receives the rewards of a
    step by group and returns the advantage of each response."""

    steps: int = Field(ge=1, le=10_000_000)
    """Number of steps. Each step generates, scores, updates and syncs once. Raise it to continue training a completed
    job."""

    prompts_per_step: int = Field(default=16, ge=1, le=65_536, json_schema_extra=immutable())
    """Prompts per step."""

    group_size: int = Field(default=8, ge=2, le=1024, json_schema_extra=immutable())
    """Responses per prompt. The advantage of a response is its reward relative to the rewards of its group."""

    updates_per_step: int = Field(default=1, ge=1, le=1024, json_schema_extra=immutable())
    """Optimizer steps per step: the step's responses are split into this number of parts."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1, json_schema_extra=immutable())
    """Learning rate of AdamW after the warm-up."""

    warmup_steps: int = Field(default=0, ge=0, le=10_000_000, json_schema_extra=immutable())
    """Number of steps in which the learning rate grows linearly from 0 to learningRate."""

    learning_rate_schedule: LearningRateSchedule = Field(default=LearningRateSchedule(), json_schema_extra=immutable())
    """Course of the learning rate after the warm-up."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1, json_schema_extra=immutable())
    """AdamW: decay rate of the mean of the gradients."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1, json_schema_extra=immutable())
    """AdamW: decay rate of the mean of the squared gradients."""

    weight_decay: float = Field(default=0.01, ge=0, le=1, json_schema_extra=immutable())
    """AdamW: weight decay of the matrices. Norms, biases and embeddings (including a tied output layer) do not
    decay."""

    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6, json_schema_extra=immutable())
    """Maximum norm of the gradient. A larger gradient is scaled down to it."""

    clip_low: float | None = Field(default=None, gt=0, lt=1, json_schema_extra=immutable())
    """Lower clip of the ratio of new to old probability, at 1 - clipLow. Absent: the default of the algorithm, as for
    clipHigh, dualClip, scaleAdvantages and lossAggregation. Clipping has no effect with updatesPerStep: 1, because the
    ratio is then 1."""

    clip_high: float | None = Field(default=None, gt=0, le=100, json_schema_extra=immutable())
    """Upper clip of the ratio of new to old probability, at 1 + clipHigh. A value above clipLow lets the probability of
    rare tokens grow."""

    dual_clip: float | None = Field(default=None, ge=0, le=1000, json_schema_extra=immutable())
    """Bound on the loss of a token with a negative advantage, as a multiple of the advantage. 0: no bound."""

    kl_coefficient: float = Field(default=0.0, ge=0, le=100, json_schema_extra=immutable())
    """Weight of the KL divergence from the initial model in the loss. 0: the initial model is not loaded."""

    entropy_coefficient: float = Field(default=0.0, ge=0, le=10, json_schema_extra=immutable())
    """Weight of the entropy bonus in the loss."""

    scale_advantages: ScaleAdvantages | None = Field(default=None, json_schema_extra=immutable())
    """Group: divide each advantage by the standard deviation of its group's rewards. None: only subtract the mean."""

    loss_aggregation: LossAggregation | None = Field(default=None, json_schema_extra=immutable())
    """TokenMean: every token of an update has the same weight. SequenceMean: every response has the same weight.
    ConstantLength: every token weighs 1 / (responses x maxResponseTokens), in short and long responses alike."""

    mask_truncated: bool = Field(default=False, json_schema_extra=immutable())
    """If true, responses that were cut at maxResponseTokens take no part in the update, nor in the advantages of their
    group."""

    importance_sampling: ImportanceSamplingSpec = Field(default=ImportanceSamplingSpec(), json_schema_extra=immutable())
    """Correction for the difference between the token probabilities of the engine and of the policy."""

    max_staleness: int = Field(default=0, ge=0, le=1, json_schema_extra=immutable())
    """0: responses are generated with the policy's latest weights. 1: with the weights of the previous step, so the
    engines generate the next step while the policy learns from the current one. 1 requires topology Disaggregated and
    importance sampling."""

    partial_rollout_prompts: int = Field(default=0, ge=0, le=65_535, json_schema_extra=immutable())
    """Number of prompts that a step may leave with unfinished responses: the engines generate for that many more
    prompts than promptsPerStep. The step takes the first promptsPerStep prompts to be complete. The responses to the
    others continue in the next step, with its weights. 0: every step waits for its longest response. Values above 0
    require maxStaleness: 1."""

    dynamic_sampling: DynamicSamplingSpec | None = Field(default=None, json_schema_extra=immutable())
    """Replace groups with equal rewards by groups of further prompts (DAPO). Absent: each step has the groups of its
    promptsPerStep prompts."""

    overlong_penalty: OverlongPenaltySpec | None = Field(default=None, json_schema_extra=immutable())
    """Reduce the reward of responses that come close to maxResponseTokens (DAPO). Absent: no penalty."""

    temperature: float = Field(default=1.0, ge=0.01, le=10, json_schema_extra=immutable())
    """Sampling temperature of rollouts. The loss uses the same temperature."""

    top_p: float = Field(default=1.0, gt=0, le=1, json_schema_extra=immutable())
    """Sample from the most probable tokens whose probabilities add up to topP. 1: from all tokens. The loss uses the
    probabilities of the whole distribution."""

    top_k: int = Field(default=0, ge=0, le=1_000_000, json_schema_extra=immutable())
    """Sample from the topK most probable tokens. 0: from all tokens."""

    min_p: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=immutable())
    """Sample from the tokens with at least minP times the probability of the most probable one. 0: from all tokens."""

    stop: list[StopString] = Field(default=[], max_length=16, json_schema_extra=immutable())
    """Strings that end a response. The response contains the string, and the policy learns to write it. A string may
    be the text of a special token."""

    max_prompt_tokens: int = Field(default=512, ge=1, le=1_000_000, json_schema_extra=only_raised())
    """Maximum tokens of a prompt. task.overlongPrompts states what happens to longer ones. It can be raised after the
    job is created, unless longer prompts are skipped."""

    max_response_tokens: int = Field(default=256, ge=1, le=1_000_000, json_schema_extra=immutable())
    """Maximum tokens of a response. Longer responses are truncated."""

    ignore_end_of_sequence: bool = Field(default=False, json_schema_extra=immutable())
    """If true, generation continues past the end-of-sequence token, so that every response has maxResponseTokens."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1, json_schema_extra=immutable())
    """Seed for the order of the data and for sampling."""

    @property
    def settings(self) -> AlgorithmSettings:
        """The settings whose default depends on the algorithm, with that default where the manifest has none."""
        written = {each.name: getattr(self, each.name) for each in fields(AlgorithmSettings)}
        given = {name: value for name, value in written.items() if value is not None}
        return replace(ALGORITHMS[self.name].defaults, **given)

    @property
    def rate_depends_on_steps(self) -> bool:
        """True if another number of steps would change the learning rates of past steps."""
        return self.learning_rate_schedule.name not in _ENDLESS_SCHEDULES

    rules: ClassVar[tuple[Rule, ...]] = (
        *map(_reading_rule, dict.fromkeys(setting for row in ALGORITHMS.values() for setting in row.unread)),
        module_rule("loss"),
        module_rule("advantage"),
        Rule(
            cel="!self.maskTruncated || !self.ignoreEndOfSequence",
            holds=lambda algorithm: not (algorithm.mask_truncated and algorithm.ignore_end_of_sequence),
            field="maskTruncated",
            message="requires responses that end, but with ignoreEndOfSequence every response is cut at "
            "maxResponseTokens: write false, or ignoreEndOfSequence: false",
        ),
        Rule(
            cel="self.dualClip == 0.0 || self.dualClip > 1.0",
            holds=lambda algorithm: not algorithm.dual_clip or algorithm.dual_clip > 1,
            field="dualClip",
            message="must be 0 (no bound) or greater than 1: write 3.0, for example",
        ),
        Rule(
            cel="self.warmupSteps == 0 || self.warmupSteps <= self.steps",
            holds=lambda algorithm: algorithm.warmup_steps <= algorithm.steps,
            field="warmupSteps",
            message="must be at most steps, otherwise the learning rate never reaches learningRate",
        ),
        Rule(
            cel="self.updatesPerStep == 1 || self.updatesPerStep <= self.promptsPerStep * self.groupSize",
            holds=lambda algorithm: algorithm.updates_per_step <= algorithm.prompts_per_step * algorithm.group_size,
            field="updatesPerStep",
            message="must be at most promptsPerStep x groupSize: every update needs at least one response",
        ),
        Rule(
            cel="self.partialRolloutPrompts == 0 || self.maxStaleness == 1",
            holds=lambda algorithm: algorithm.partial_rollout_prompts == 0 or algorithm.max_staleness == 1,
            field="partialRolloutPrompts",
            message="requires maxStaleness: 1, because unfinished responses continue with other weights: "
            "write maxStaleness: 1 and topology: Disaggregated, or partialRolloutPrompts: 0",
        ),
        Rule(
            cel="self.partialRolloutPrompts == 0 || self.partialRolloutPrompts < self.promptsPerStep",
            holds=lambda algorithm: algorithm.partial_rollout_prompts < algorithm.prompts_per_step,
            field="partialRolloutPrompts",
            message="must be less than promptsPerStep, because each step completes the prompts that the "
            "previous step left: write a quarter of promptsPerStep, or 0",
        ),
        Rule(
            cel="self.partialRolloutPrompts == 0 || !self.ignoreEndOfSequence",
            holds=lambda algorithm: algorithm.partial_rollout_prompts == 0 or not algorithm.ignore_end_of_sequence,
            field="partialRolloutPrompts",
            message="requires responses of different lengths, but with ignoreEndOfSequence every response has "
            "maxResponseTokens: write 0, or ignoreEndOfSequence: false",
        ),
        Rule(
            cel="!has(self.dynamicSampling) || self.partialRolloutPrompts == 0",
            holds=lambda algorithm: algorithm.dynamic_sampling is None or algorithm.partial_rollout_prompts == 0,
            field="dynamicSampling",
            message="requires partialRolloutPrompts: 0, because both decide which prompts a step learns from: remove "
            "one of them",
        ),
        Rule(
            cel="!has(self.overlongPenalty) || self.overlongPenalty.bufferTokens <= self.maxResponseTokens",
            holds=lambda algorithm: (
                algorithm.overlong_penalty is None
                or algorithm.overlong_penalty.buffer_tokens <= algorithm.max_response_tokens
            ),
            field="overlongPenalty.bufferTokens",
            message="must be at most maxResponseTokens: the penalty begins at maxResponseTokens - bufferTokens",
        ),
        Rule(
            cel="self.topK != 1",
            holds=lambda algorithm: algorithm.top_k != 1,
            field="topK",
            message="must be 0 (all tokens) or at least 2: with one token to choose from, all responses to a prompt "
            "are equal, and the policy learns nothing",
        ),
        Rule(
            cel="self.stop.size() == 0 || !self.ignoreEndOfSequence",
            holds=lambda algorithm: not algorithm.stop or not algorithm.ignore_end_of_sequence,
            field="stop",
            message="contradicts ignoreEndOfSequence, with which every response has maxResponseTokens: remove one of "
            "them",
        ),
        Rule(
            cel="self.stop.size() == 0 || self.partialRolloutPrompts == 0",
            holds=lambda algorithm: not algorithm.stop or algorithm.partial_rollout_prompts == 0,
            field="stop",
            message="requires partialRolloutPrompts: 0, because a string is not found if the response was interrupted "
            "within it: remove one of them",
        ),
    )
