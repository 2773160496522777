"""A rollout engine: vLLM in this process. Start, generation, sleep and weight sync."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_trainer.errors import TrainerError
from rljob_trainer.models.checkpoint import policy_weight_shapes
from rljob_trainer.rollout.config import RolloutConfig, engine_arguments
from rljob_trainer.rollout.synced_weights import SyncedWeights
from rljob_trainer.rollout_batch import Completion


class RolloutEngine:
    """One vLLM engine. It generates only with a complete version of the weights from the policy.

    vLLM changes torch for the whole process: each engine needs its own process, with the variables of
    `engine_environment`.
    """

    def __init__(self, rank: int, config: RolloutConfig) -> None:
        self.rank = rank
        self._config = config
        self._weights = SyncedWeights(policy_weight_shapes(config.model_dir))
        self._update_session_open = False
        self._asleep: set[str] = set()
        self._llm: Any = None

    def import_engine(self) -> None:
        """Import the modules that `start` needs. Takes seconds, and no GPU memory."""
        from vllm import LLM  # noqa: F401

        register_model_class(self._config.model_dir)

    def start(self) -> None:
        """Start vLLM with random weights. Raises `BadInput` for unknown engine arguments."""
        self.import_engine()
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        from rljob_trainer.weight_sync.receive import weight_transfer_backend

        self._llm = LLM(
            **engine_arguments(self._config, EngineArgs.__dataclass_fields__),
            weight_transfer_config=WeightTransferConfig(backend=weight_transfer_backend(self._config.device)),
        )
        self._llm.init_weight_transfer_engine({"init_info": {}})

    # --- generation ---

    def generate(self, prompts: Sequence[Sequence[int]], group_size: int, seeds: Sequence[int]) -> list[Completion]:
        """`group_size` completions of each prompt (token ids), group after group.

        The same prompt, seed and weights give the same completions. Raises `WeightsNotSynced` before the first weight
        sync, and after an incomplete one.
        """
        self._weights.require()
        if self._asleep:
            raise TrainerError(
                "expected the rollout engine to be awake, found it asleep; wake its weights and its KV cache first"
            )
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [self._sampling(group_size, seed) for seed in seeds],
            use_tqdm=False,
        )
        return completions_of(outputs, self._llm.get_tokenizer())

    def _sampling(self, group_size: int, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=group_size,
            seed=seed,
            temperature=self._config.temperature,
            # With a truncated distribution, the engine's log-probabilities would differ from the policy's.
            top_p=1.0,
            top_k=0,
            max_tokens=self._config.max_response_tokens,
            ignore_eos=self._config.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            # Done per token, it would dominate a decoding step; `completions_of` does it once at the end.
            detokenize=False,
        )

    # --- sleep: no effect on the CPU and at level 0 ---

    def sleep(self) -> None:
        """Free the GPU memory of the KV cache and the weights."""
        if self._config.device == "cpu" or self._config.sleep_level == 0 or self._asleep:
            return
        if self._config.sleep_level == 2:
            self._weights.drop()
        self._llm.sleep(level=self._config.sleep_level)
        self._asleep = {"weights", "kv_cache"}

    def wake_weights(self) -> None:
        """Allocate GPU memory for the weights. After sleep level 2 they are undefined until the next weight sync."""
        self._wake("weights")

    def wake_kv_cache(self) -> None:
        """Allocate GPU memory for the KV cache."""
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    # --- weight sync: called by `weight_sync.send_weights` from the policy's process ---

    def start_weight_update(self) -> None:
        """Start to receive a version of the weights. The engine does not generate until it is complete."""
        if "weights" in self._asleep:
            raise TrainerError("expected the rollout engine's weights to be awake, found them asleep; wake them first")
        if self._weights.interrupted:
            self._undo_interrupted_update()
        self._weights.begin()
        self._llm.start_weight_update()
        self._update_session_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. `update_info`: the `names` of its weights, and the arguments of the transfer backend."""
        try:
            self._llm.update_weights({"update_info": update_info})
        except BaseException:
            # After a failure, vLLM closes its session with the model partly loaded.
            self._update_session_open = False
            raise
        self._weights.receive(update_info["names"])

    def finish_weight_update(self, version: int) -> None:
        """Complete the sync. Raises `WeightsNotSynced` if weights are missing."""
        self._llm.finish_weight_update()
        self._update_session_open = False
        # Cached keys and values belong to the previous weights.
        if not self._llm.reset_prefix_cache():
            raise TrainerError("the engine's prefix cache could not be reset: requests are still running")
        self._weights.complete(version)

    def weight_version(self) -> int | None:
        """The version of the weights; None if the engine cannot generate."""
        return self._weights.version

    def _undo_interrupted_update(self) -> None:
        """Prepare vLLM for a new update: buffered weights would count for it."""
        from rljob_trainer.weight_sync.receive import drop_buffered_weights

        self._llm.apply_model(drop_buffered_weights)
        if not self._update_session_open:
            self._llm.start_weight_update()
        self._llm.finish_weight_update()
        self._update_session_open = False

    # --- end ---

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None


def completions_of(request_outputs: Iterable[Any], tokenizer: Any) -> list[Completion]:
    """Completions from `vllm.RequestOutput`s with `logprobs=0` and `flat_logprobs`, group after group.

    `tokenizer`: a Hugging Face tokenizer. It decodes all texts at once, without special tokens.
    """
    outputs = [o for request in request_outputs for o in sorted(request.outputs, key=lambda output: output.index)]
    texts = tokenizer.batch_decode([list(output.token_ids) for output in outputs], skip_special_tokens=True)
    return [_completion(output, text) for output, text in zip(outputs, texts, strict=True)]


def _completion(output: Any, text: str) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise TrainerError(f"the engine finished a response with {output.finish_reason!r}; expected 'stop' or 'length'")
    token_ids = list(output.token_ids)
    # One log-probability a position: that of the sampled token.
    logprobs = list(output.logprobs.logprobs) if token_ids else []
    if len(logprobs) != len(token_ids):
        raise TrainerError(f"the engine returned {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    return Completion(token_ids, logprobs, finished=output.finish_reason == "stop", text=text)


def register_model_class(model_dir: Path) -> None:
    """Register the imported class of the model in `model_dir` with vLLM.

    Otherwise vLLM inspects the class in a subprocess, to keep CUDA uninitialized in a process that may fork. The
    subprocess imports vLLM again, and a new pod has no cache of its result. Here the engine does not fork. vLLM itself
    reports a class that cannot be imported.
    """
    from vllm import ModelRegistry

    for architecture in json.loads((model_dir / "config.json").read_text()).get("architectures") or []:
        if model := ModelRegistry.models.get(architecture):
            with suppress(Exception):
                ModelRegistry.register_model(architecture, model.load_model_cls())
