"""A rollout engine, or one of several processes of one: vLLM in this process. Start, generation and weight sync."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput, RunError
from rljob_client.model_files import read_config
from rljob_trainer.models.checkpoint import policy_weight_shapes
from rljob_trainer.rollout.config import RolloutConfig, engine_arguments
from rljob_trainer.rollout.fast_decoding import install_fast_decoding
from rljob_trainer.rollout.lots import Lot, LotResult, Sampling, Segment, WholeGroups, generate_lot
from rljob_trainer.rollout.requests import Requests
from rljob_trainer.rollout.start_work import spare_start_work
from rljob_trainer.rollout.synced_weights import SyncedWeights
from rljob_trainer.rollout_batch import Completion

ENGINE_HOST = "127.0.0.1"
"""All processes of an engine are in one pod."""

_REPORTS = 16
"""Most reports of complete groups in the time of the longest response. At each, an engine waits for a millisecond or
two."""
_LEAST_STEPS = 16
"""Decoding steps between two reports: those of the smallest models take about as long as a report."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One process of an engine."""

    index: int

    size: int
    """Processes of the engine."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def has_peers(self) -> bool:
        return self.size > 1


class RolloutEngine(ABC):
    """One vLLM engine. It generates only with a complete version of the weights from the policy.

    vLLM changes torch for the whole process: each engine needs its own process, with the variables of
    `engine_environment`. It reads no weights: they come from the policy, in a way that the topology decides.

    With `tensor_parallel_size`, an engine consists of that many such processes. All get the same calls, and each holds
    its part of the weights: it receives whole weights, and vLLM's loaders keep the part.
    """

    def __init__(self, rank: int, config: RolloutConfig) -> None:
        """`rank`: among the processes of all engines, which are numbered engine by engine."""
        self.rank = rank
        self._config = config
        self._weights = SyncedWeights(policy_weight_shapes(config.model_dir))
        self._update_session_open = False
        self._llm: Any = None
        self._requests: Requests | None = None
        self.shard = Shard(rank % config.tensor_parallel_size, config.tensor_parallel_size)
        self._store: Any = None
        self._fast_decoding = False

    def import_engine(self) -> None:
        """Import the modules that `start` needs. Takes seconds, and no GPU memory."""
        from vllm import LLM  # noqa: F401

        register_model_class(self._config.model_dir)

    def serve_store(self) -> int:
        """Open a store in the first of an engine's processes. Returns the port at which the others meet it."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # torch's process group uses this store of its own process (`multi_tenant`), so no other program can take the
        # port in between.
        self._store = TCPStore(ENGINE_HOST, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return int(self._store.port)

    def start(self, store_port: int = 0) -> None:
        """Start vLLM with random weights. Returns when all processes of the engine have started.

        `store_port`: from the engine's first process, if there are several. Raises `BadInput` for unknown engine
        arguments.
        """
        self.import_engine()
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        arguments = engine_arguments(self._config, EngineArgs.__dataclass_fields__)
        if self._config.device == "cuda":
            spare_start_work(self._sampling(group_size=1, seed=0))
        if self.shard.has_peers:
            from rljob_trainer.rollout.shard_executor import shard_executor

            arguments["distributed_executor_backend"] = shard_executor(self.shard.index, store_port)
        self._llm = LLM(
            **arguments,
            weight_transfer_config=WeightTransferConfig(backend=self._weight_transfer_backend()),
        )
        if self._config.logit_scale != 1:
            self._scale_logits(self._config.logit_scale)
        # vLLM looks for stop strings in the text, which the fast path does not decode.
        self._fast_decoding = not self._config.algorithm.stop and install_fast_decoding(self._llm)
        self._requests = Requests(self._llm)

    @abstractmethod
    def _weight_transfer_backend(self) -> str:
        """The name of vLLM's weight-transfer backend."""

    # --- generation ---

    def generate(self, prompts: Sequence[Sequence[int]], group_size: int, seeds: Sequence[int]) -> list[Completion]:
        """`group_size` completions of each prompt (token ids), group after group.

        If the engine has several processes, all must be called with the same arguments. Only the first one returns
        completions.

        The same prompt, seed and weights give the same completions. Raises `WeightsNotSynced` before the first weight
        sync, and after an incomplete one.
        """
        requests = self._ready_requests()
        requests.abandon()
        sampling = [self._sampling(group_size, seed) for seed in seeds]
        outputs = self._same_in_all_processes(requests.run(prompts, sampling))
        return completions_of(outputs, self._llm.get_tokenizer()) if self.shard.is_first else []

    def generate_groups(self, groups: WholeGroups, sequences_left: int = 0) -> list[tuple[int, list[Completion]]]:
        """Generate `groups` together with those of earlier calls. Returns complete groups by place; others remain.

        Returns once at most `sequences_left` sequences are unfinished, or as soon as a group is complete, but then not
        more often than `_REPORTS` and `_LEAST_STEPS` allow. It counts tokens, not time, so that all processes of an
        engine return after the same decoding step.

        Completions, processes and errors: as `generate`.
        """
        requests = self._ready_requests()
        for place, prompt, seed in zip(groups.places, groups.prompts, groups.seeds, strict=True):
            requests.add(place, prompt, self._sampling(groups.group_size, seed, sampling=groups.sampling))
        found: list[tuple[int, Any]] = []
        steps, report_at = 0, max(_LEAST_STEPS, self._config.algorithm.max_response_tokens // _REPORTS)
        while requests.unfinished_sequences:
            found += requests.step()
            steps += 1
            if (found and steps >= report_at) or requests.unfinished_sequences <= sequences_left:
                break
        outputs = self._same_in_all_processes([output for _, output in found])
        if not (self.shard.is_first and found):
            return []
        completions = iter(completions_of(outputs, self._llm.get_tokenizer()))
        return [(place, [next(completions) for _ in output.outputs]) for place, output in found]

    @property
    def unfinished_sequences(self) -> int:
        """Sequences of groups that were begun and are not complete."""
        return self._requests.unfinished_sequences if self._requests else 0

    def abandon_groups(self) -> None:
        """Drop the groups that are not complete."""
        if self._requests:
            self._requests.abandon()

    def begin_generation(self) -> None:
        """Drop the groups and the cached prefixes of earlier generations, so that the next one does not depend on
        them."""
        self.abandon_groups()
        self._reset_prefix_cache()

    def generate_lots(self, lots: Sequence[Lot]) -> list[LotResult]:
        """Complete the quota of each lot, one after the other (`lots.generate_lot`).

        Processes and errors: as `generate`.
        """
        self._ready_requests().abandon()
        version = self._weights.require()
        results = [
            generate_lot(lot, self._config.algorithm.max_response_tokens, version, self._segments) for lot in lots
        ]
        return [self._with_texts(result) for result in results] if self.shard.is_first else []

    def _segments(self, segments: Sequence[Segment]) -> list[Completion]:
        sampling = [self._sampling(1, segment.seed, segment.max_tokens) for segment in segments]
        outputs = self._ready_requests().run([segment.token_ids for segment in segments], sampling)
        self._same_in_all_processes(outputs)
        return [_completion(output, "") for request in outputs for output in request.outputs]

    def _with_texts(self, result: LotResult) -> LotResult:
        responses = [response for group in result.completed for response in group.responses]
        texts = iter(_texts(responses, self._llm.get_tokenizer()))
        completed = [
            replace(group, responses=[replace(response, text=next(texts)) for response in group.responses])
            for group in result.completed
        ]
        return replace(result, completed=completed)

    def _ready_requests(self) -> Requests:
        """The requests of an engine that can generate. Raises `WeightsNotSynced`."""
        self._weights.require()
        assert self._requests is not None
        return self._requests

    def _same_in_all_processes(self, outputs: list[Any]) -> list[Any]:
        """vLLM's outputs, which are given. Raises `RunError` if another process of the engine has others."""
        if self.shard.has_peers:
            from rljob_trainer.rollout.shard_executor import require_same_tokens

            require_same_tokens(outputs)
        return outputs

    def _sampling(
        self, group_size: int, seed: int, max_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Any:
        """vLLM's SamplingParams. `max_tokens`: of a part of a response; None: of a whole one."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        algorithm = self._config.algorithm
        given = sampling or Sampling(
            algorithm.temperature, algorithm.top_p, algorithm.max_response_tokens, algorithm.top_k, algorithm.min_p
        )
        return SamplingParams(
            n=group_size,
            seed=seed,
            temperature=given.temperature * self._config.logit_scale,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            stop=list(algorithm.stop),
            # A stop string may be the text of a special token.
            skip_special_tokens=False,
            max_tokens=max_tokens or given.max_tokens,
            ignore_eos=algorithm.ignore_end_of_sequence,
            logprobs=0,
            flat_logprobs=True,
            # Done per token, it would dominate a decoding step; `completions_of` does it once at the end.
            detokenize=bool(algorithm.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _scale_logits(self, scale: float) -> None:
        """Multiply the logits by `scale` in the model. Raises `BadInput` if its head is not vLLM's usual one."""

        def scale_head(model: Any) -> int:
            from vllm.model_executor.layers.logits_processor import LogitsProcessor

            heads = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
            for head in heads:
                head.scale *= scale
            return len(heads)

        if self._llm.apply_model(scale_head) != [1]:
            raise BadInput(
                "algorithm.temperature: expected a model whose logits vLLM can scale, which topP, topK and minP "
                "require, found another head; write 1.0, or remove topP, topK and minP"
            )

    # --- weight sync: called by `weight_sync` from the policy's process ---

    def start_weight_update(self) -> None:
        """Start to receive a version of the weights. The engine does not generate until it is complete."""
        self.abandon_groups()
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
        self._reset_prefix_cache()  # cached keys and values belong to the previous weights
        self._weights.complete(version)

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RunError("the engine's prefix cache could not be reset: requests are still running")

    def _undo_interrupted_update(self) -> None:
        """Prepare vLLM for a new update: buffered weights would count for it."""
        self._llm.apply_model(_drop_buffered_weights)
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


@cache
def registered_backend(name: str, engine: str) -> str:
    """`name`, by which vLLM now finds the class `engine` of `weight_sync.engine_side` as a weight-transfer backend."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(name, "rljob_trainer.weight_sync.engine_side", engine)
    return name


def _drop_buffered_weights(model: Any) -> None:
    """Drop the tensors of incomplete layers after an interrupted update.

    vLLM counts elements to decide when a layer is complete. Otherwise the next update would complete it with weights of
    two versions.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def completions_of(request_outputs: Iterable[Any], tokenizer: Any) -> list[Completion]:
    """Completions from `vllm.RequestOutput`s with `logprobs=0` and `flat_logprobs`, group after group.

    `tokenizer`: a Hugging Face tokenizer. It decodes all texts at once, without special tokens.
    """
    outputs = [o for request in request_outputs for o in sorted(request.outputs, key=lambda output: output.index)]
    texts = _texts(outputs, tokenizer)
    return [_completion(output, text) for output, text in zip(outputs, texts, strict=True)]


def _texts(outputs: Iterable[Any], tokenizer: Any) -> list[str]:
    texts: list[str] = tokenizer.batch_decode([list(each.token_ids) for each in outputs], skip_special_tokens=True)
    return texts


def _completion(output: Any, text: str) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RunError(f"the engine finished a response with {output.finish_reason!r}; expected 'stop' or 'length'")
    # Arrays of 4 bytes a number, which Ray copies as they are.
    token_ids = array("i", output.token_ids)
    # One log-probability a position: that of the sampled token.
    logprobs = array("f", output.logprobs.logprobs if token_ids else ())
    if len(logprobs) != len(token_ids):
        raise RunError(f"the engine returned {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    return Completion(token_ids, logprobs, finished=output.finish_reason == "stop", text=text)


def register_model_class(model_dir: Path) -> None:
    """Register the imported class of the model in `model_dir` with vLLM.

    Otherwise vLLM inspects the class in a subprocess, to keep CUDA uninitialized in a process that may fork. The
    subprocess imports vLLM again, and a new pod has no cache of its result. Here the engine does not fork. vLLM itself
    reports a class that cannot be imported.
    """
    from vllm import ModelRegistry

    for architecture in read_config(model_dir)["architectures"]:
        if model := ModelRegistry.models.get(architecture):
            with suppress(Exception):
                ModelRegistry.register_model(architecture, model.load_model_cls())
