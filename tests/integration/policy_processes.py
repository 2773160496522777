"""Policy ranks in separate processes, without Ray, for the tests of the policy.

The processes are forked from a server that has imported torch and transformers once, so that a test of four ranks does
not import them four times.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rljob_api.algorithm import AlgorithmSpec, ImportanceSamplingSpec
from rljob_testing.memory_plans import memory_plan
from rljob_testing.policy_models import master_of
from rljob_trainer.algorithm.micro_batch import completions_with_tokens
from rljob_trainer.ledger.checkpoint_manifest import MANIFEST_NAME, FileDigest, describe
from rljob_trainer.policy.checkpoint_layout import SaveInPieces
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.gradients import full
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch

VOCABULARY = 64
ALL_TERMS: dict[str, Any] = {
    "loss_aggregation": "SequenceMean",
    "importance_sampling": ImportanceSamplingSpec(mode="Mask"),
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.05,
    "dual_clip": 1.5,
}
"""Settings of the algorithm with which every term of the loss counts."""

os.environ["OMP_NUM_THREADS"] = "1"
_processes = get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "rljob_trainer.policy.rank",
        "torch.distributed.checkpoint.state_dict",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
    ]
)


def sweep(quick: Iterable[tuple[Any, ...]], *others: tuple[Any, ...]) -> list[Any]:
    """Parameters of a test: those of `quick`, in which every value occurs, and others that run with --long."""
    return [*quick, *(pytest.param(*values, marks=pytest.mark.long) for values in others)]


class RankProcesses:
    """One process a rank; `run` calls a function with each rank's `PolicyRank` and gives the results by rank."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        results = self.outcomes(function, *args)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of each rank, or its exception."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [pipe.recv() for pipe in self._pipes]

    def rejoin(self, *, undo_update: bool) -> None:
        """Form a new group of the ranks, as the controller does after a failure."""
        address = RankProcesses(self._pipes[:1]).call("rendezvous")[0]
        self.run(_rejoin, *address, undo_update)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.run(_call_method, method, *args)


@contextmanager
def policy_processes(ranks: int, config: PolicyConfig, *, load: bool = True) -> Iterator[RankProcesses]:
    """`ranks` connected ranks, with the model loaded unless `load` is False."""
    pipes, workers = [], []
    for rank in range(ranks):
        here, there = _processes.Pipe()
        workers.append(_processes.Process(target=_serve, args=(there, rank, ranks, config), daemon=True))
        workers[-1].start()
        there.close()
        pipes.append(here)
    try:
        processes = RankProcesses(pipes)
        address = RankProcesses(pipes[:1]).call("rendezvous")[0]
        processes.call("connect", *address)
        if load:
            processes.call("load")
        yield processes
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(timeout=20)


def weights_digest(policy: PolicyRank) -> str:
    """SHA-256 of the names and the float32 masters of all trained parameters; the same on every rank."""
    digest = hashlib.sha256()
    for name, parameter in policy._optimizer.parameters.items():
        digest.update(name.encode())
        master = full(parameter) if isinstance(parameter, DTensor) else master_of(policy._optimizer, name)
        # A copy: memory that numpy has seen could not be freed in place (`policy_offload`).
        digest.update(master.to("cpu", copy=True).contiguous().numpy().tobytes())
    return digest.hexdigest()


def state_of(policy: RankProcesses) -> str:
    """The `weights_digest`, which all ranks agree on."""
    digest: str
    [digest] = set(policy.run(weights_digest))
    return digest


def token_logprobs(policy: PolicyRank, batch: RolloutBatch) -> list[FloatArray]:
    """The policy's log-probabilities of all response tokens: float32 arrays, parallel to `batch.response_ids`."""
    completions, update = completions_with_tokens(batch), policy._loaded.with_weights().update
    micro_batches = list(update.micro_batches(batch, completions, completions))
    mine = {
        completion: part.numpy()
        for micro_batch, logprobs in zip(micro_batches, update.logprobs(micro_batches), strict=True)
        for completion, part in zip(
            micro_batch.completions, logprobs.cpu().split(micro_batch.response_lengths), strict=True
        )
    }
    shares: list[dict[int, FloatArray]] = [{} for _ in range(policy.world_size)]
    dist.all_gather_object(shares, mine)
    found = {completion: values for share in shares for completion, values in share.items()}
    return [found.get(completion, np.zeros(0, np.float32)) for completion in range(len(batch))]


def _serve(pipe: Connection, rank: int, ranks: int, config: PolicyConfig) -> None:
    torch.set_num_threads(1)
    policy = PolicyRank(rank, ranks, config)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            # No clean-up: a peer may hang in a collective that will never complete.
            os._exit(0)
        try:
            pipe.send(function(policy, *args))
        except Exception as error:
            pipe.send(error)


def _call_method(policy: PolicyRank, method: str, *args: Any) -> Any:
    return getattr(policy, method)(*args)


def _rejoin(policy: PolicyRank, host: str, port: int, undo_update: bool) -> None:
    policy.rejoin(host, port, undo_update)


def parameters(policy: PolicyRank) -> dict[str, np.ndarray]:
    """All parameters by their Hugging Face names; run on every rank."""
    return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in policy.named_full_parameters()}


def complete_checkpoint(policy: RankProcesses, directory: Path) -> dict[str, FileDigest]:
    """Wait until the ranks have written a checkpoint, and write its manifest, as the controller does. Returns the
    checksums of the ranks' files."""
    digests = {name: digest for of_rank in policy.call("finish_checkpoint") for name, digest in of_rank.items()}
    (directory / MANIFEST_NAME).write_bytes(describe(directory, 1, digests).to_json())
    return digests


def written_checkpoint(policy: RankProcesses, directory: Path) -> Path:
    """The state of `policy` in `directory`, with the manifest."""
    policy.call("start_checkpoint", directory)
    complete_checkpoint(policy, directory)
    return directory


def before_each_piece(wait: Callable[[], object]) -> None:
    """In a policy process: call `wait` before each piece of a checkpoint is written."""
    resolve = SaveInPieces.resolve_data

    def waiting(planner: SaveInPieces, item: WriteItem) -> Any:
        wait()
        return resolve(planner, item)

    SaveInPieces.resolve_data = waiting  # type: ignore[assignment, method-assign]


def tiny_model(
    directory: Path,
    kind: str = "qwen3",
    *,
    tied: bool = False,
    initializer_range: float = 0.1,
    vocabulary: int = VOCABULARY,
    hidden_size: int = 32,
) -> Path:
    """A random model of 2 layers, with sharp enough logits that a wrong weight shows."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": initializer_range,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(directory)
    return directory


def policy_config(model_dir: Path, output_dir: Path, **changes: Any) -> PolicyConfig:
    """Float32 on the CPU, with a budget and a chunk small enough that every batch needs several of each.

    `changes`: settings of the policy, or of its algorithm.
    """
    of_algorithm = {name: changes.pop(name) for name in list(changes) if name in AlgorithmSpec.model_fields}
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "algorithm": AlgorithmSpec(steps=100, **({"learning_rate": 1e-4} | of_algorithm)),
        "memory": memory_plan(micro_batch_tokens=40, logprob_chunk_tokens=7),
    }
    return PolicyConfig(model_dir=model_dir, output_dir=output_dir, **(settings | changes))


def tiny_config(directory: Path, **changes: Any) -> PolicyConfig:
    """`policy_config` of a tiny model in `directory`, which is made unless it is there."""
    model_dir = directory / "model"
    if not model_dir.exists():
        tiny_model(model_dir)
    return policy_config(model_dir, directory / "run", **changes)


def scored_batch(
    step: int, *, prompts: int = 4, group_size: int = 3, seed: int = 0, longest_prompt: int = 8
) -> RolloutBatch:
    """Responses of 0 to 14 tokens, the first of them empty; one log-probability of the engine is not finite."""
    draw = np.random.default_rng(1000 * seed + step)
    completions = prompts * group_size
    lengths = [0, *draw.integers(0, 15, completions - 2), 14]
    logprobs = [draw.normal(-4.0, 0.5, length).astype(np.float32) for length in lengths]
    logprobs[-1][3] = -np.inf
    return RolloutBatch(
        step=step,
        group_size=group_size,
        prompt_ids=[
            draw.integers(3, VOCABULARY, draw.integers(1, longest_prompt + 1)).astype(np.int32) for _ in range(prompts)
        ],
        response_ids=[draw.integers(2, VOCABULARY, length).astype(np.int32) for length in lengths],
        rollout_logprobs=logprobs,
        finished=np.ones(completions, np.bool_),
    ).scored(*draw.normal(size=(2, completions)).astype(np.float32))
