"""How the policy learns: GRPO and its corrections."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, Rule, immutable


class ImportanceSamplingSpec(ApiModel):
    """Correction for the difference between the engine's probabilities and the policy's."""

    mode: Literal["Truncate", "Mask", "Disabled"] = "Truncate"
    """Truncate: weigh each token by min(policy/rollout probability, cap). Mask: weigh it by that ratio, and drop it
    where the ratio is above cap or below 1/cap. Disabled: no correction."""

    cap: float = Field(default=2.0, gt=1, le=1000)
    """The largest ratio of probabilities that counts in full."""


class AlgorithmSpec(ApiModel):
    """How the policy learns. Only `steps` is required, and only `steps` may change while the job lives."""

    name: Literal["grpo"] = Field(default="grpo", json_schema_extra=immutable())
    """The algorithm: group relative policy optimization."""

    steps: int = Field(ge=1, le=10_000_000)
    """Steps of the job, each generate, score, update and sync once. May be raised later to train on."""

    prompts_per_step: int = Field(default=16, ge=1, le=65_536, json_schema_extra=immutable())
    """Prompts of a step."""

    group_size: int = Field(default=8, ge=2, le=1024, json_schema_extra=immutable())
    """Responses to each prompt; a response's advantage is its reward relative to its group."""

    updates_per_step: int = Field(default=1, ge=1, le=1024, json_schema_extra=immutable())
    """Optimizer steps a step: the step's responses are split into so many parts."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1, json_schema_extra=immutable())
    """Learning rate of AdamW after the warm-up."""

    warmup_steps: int = Field(default=0, ge=0, le=10_000_000, json_schema_extra=immutable())
    """Steps over which the learning rate rises linearly from 0."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1, json_schema_extra=immutable())
    """AdamW: decay of the mean of the gradients."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1, json_schema_extra=immutable())
    """AdamW: decay of the mean of the squared gradients."""

    weight_decay: float = Field(default=0.01, ge=0, le=1, json_schema_extra=immutable())
    """AdamW: weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6, json_schema_extra=immutable())
    """The gradient is scaled down to this norm where it is larger."""

    clip_low: float = Field(default=0.2, gt=0, lt=1, json_schema_extra=immutable())
    """The ratio of new to old probability counts down to 1 - clipLow."""

    clip_high: float = Field(default=0.28, gt=0, le=100, json_schema_extra=immutable())
    """The ratio of new to old probability counts up to 1 + clipHigh; larger than clipLow lets rare tokens rise."""

    dual_clip: float = Field(default=3.0, ge=0, le=1000, json_schema_extra=immutable())
    """Bound on the loss of tokens with a negative advantage, as a multiple of the advantage. 0: no bound."""

    kl_coefficient: float = Field(default=0.0, ge=0, le=100, json_schema_extra=immutable())
    """Weight of the KL divergence from the first model in the loss. 0: the reference model is not loaded."""

    entropy_coefficient: float = Field(default=0.0, ge=0, le=10, json_schema_extra=immutable())
    """Weight of the entropy bonus in the loss."""

    scale_advantages: Literal["Group", "None"] = Field(default="Group", json_schema_extra=immutable())
    """Group: divide advantages by the standard deviation of their group's rewards. None: only subtract the mean."""

    loss_aggregation: Literal["TokenMean", "SequenceMean"] = Field(default="TokenMean", json_schema_extra=immutable())
    """TokenMean: every token of the step weighs the same. SequenceMean: every response weighs the same."""

    importance_sampling: ImportanceSamplingSpec = Field(default=ImportanceSamplingSpec(), json_schema_extra=immutable())
    """Correction for the difference between the engine's probabilities and the policy's."""

    temperature: float = Field(default=1.0, ge=0.01, le=10, json_schema_extra=immutable())
    """Sampling temperature of the rollouts; the loss uses the same."""

    max_prompt_tokens: int = Field(default=512, ge=1, le=1_000_000, json_schema_extra=immutable())
    """Longest prompt. A longer one is an error that names it."""

    max_response_tokens: int = Field(default=256, ge=1, le=1_000_000, json_schema_extra=immutable())
    """Responses are cut at this length."""

    ignore_end_of_sequence: bool = Field(default=False, json_schema_extra=immutable())
    """Generate on past the end-of-sequence token, so that every response has maxResponseTokens."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1, json_schema_extra=immutable())
    """Seed of the data order and of sampling."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.dualClip == 0.0 || self.dualClip > 1.0",
            holds=lambda algorithm: algorithm.dual_clip == 0 or algorithm.dual_clip > 1,
            field="dualClip",
            message="must be 0 (no bound) or larger than 1, such as 3.0",
        ),
        Rule(
            cel="self.warmupSteps <= self.steps",
            holds=lambda algorithm: algorithm.warmup_steps <= algorithm.steps,
            field="warmupSteps",
            message="must not exceed steps: the learning rate would never reach learningRate",
        ),
        Rule(
            cel="self.updatesPerStep <= self.promptsPerStep * self.groupSize",
            holds=lambda algorithm: algorithm.updates_per_step <= algorithm.prompts_per_step * algorithm.group_size,
            field="updatesPerStep",
            message="must not exceed promptsPerStep x groupSize: every update needs at least one response",
        ),
    )
