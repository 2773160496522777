"""Loads the models of a rank: the trained one and, with a KL term, the initial one, each on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rljob_client.model_files import has_only_bfloat16
from rljob_trainer.algorithm.gradient_sums import sum_matrices
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.lora import add_adapters
from rljob_trainer.policy.model import (
    PolicyModel,
    build_policy_model,
    compile_layers,
    keep_on_host,
    sent_name,
    shard,
    to_compute_dtype,
)
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.packed_attention import can_pack
from rljob_trainer.policy.policy_offload import PolicyOffload
from rljob_trainer.policy.state_snapshot import StateSnapshot
from rljob_trainer.policy.update import PolicyUpdate
from rljob_trainer.policy.weight_loading import load_weights


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """The parts of a loaded policy, whose weights may be in host memory: `with_weights` brings them to the device. Code
    that can read weights in host memory (`MasterAdamW.weights_of`) uses the other members.
    """

    model: PolicyModel

    reference: PolicyModel | None
    """The reference model; with adapters, `model` itself."""

    optimizer: MasterAdamW

    snapshot: StateSnapshot | None

    update: PolicyUpdate

    offload: PolicyOffload

    def with_weights(self) -> LoadedPolicy:
        """The parts, with weights on the device. If it lacks the memory, its error is raised, and nothing changes."""
        self.offload.bring_back()
        return self

    def models(self) -> list[PolicyModel]:
        return distinct_models(self.model, self.reference)


def distinct_models(model: PolicyModel, reference: PolicyModel | None) -> list[PolicyModel]:
    return [model] if reference is None or reference is model else [model, reference]


def trained_model(config: PolicyConfig, ranks: int) -> tuple[PolicyModel, dict[str, Tensor]]:
    """The model on its device, and the remainders of its masters by name (int16, of the shapes of the local shards).

    FSDP shards float32 parameters, which are themselves the masters. A single rank keeps trained weights in the
    compute dtype; frozen weights with adapters always have it. Raises `BadInput` if the model cannot be used.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    lossless = ranks == 1 and dtype == torch.bfloat16 and has_only_bfloat16(config.model_dir)
    model = _build(config, dtype if lossless or config.lora else torch.float32)
    if config.lora is not None:
        add_adapters(model.causal_lm, config.lora, config.algorithm.seed)
    remainders = to_compute_dtype(model, dtype) if ranks == 1 else {}
    if config.lora is None:
        sum_matrices(model)
    if config.device == "cuda":
        compile_layers(model.decoder_layers)
    shard(model, _mesh(config, ranks), dtype)
    load_weights(model, config.model_dir, config.device, sent_name, remainders)
    return model, remainders


def reference_model(config: PolicyConfig, ranks: int, trained: PolicyModel) -> PolicyModel | None:
    """The initial model, frozen, in the compute dtype; in host memory if the whole optimizer's state is there.

    None without a KL term. With adapters, the model without them: no second copy.
    """
    if config.algorithm.kl_coefficient <= 0:
        return None
    if config.lora is not None:
        return trained
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = _build(config, dtype).requires_grad_(False)
    if config.device == "cuda":
        compile_layers(model.decoder_layers)
    on_host = config.device == "cuda" and config.memory.optimizer_offload == 1
    if on_host:
        keep_on_host(model, _mesh(config, ranks))
    else:
        shard(model, _mesh(config, ranks), dtype)
    load_weights(model, config.model_dir, "cpu" if on_host else config.device, sent_name)
    return model


def _build(config: PolicyConfig, dtype: torch.dtype) -> PolicyModel:
    return build_policy_model(
        config.model_dir,
        temperature=config.algorithm.temperature,
        chunk_tokens=config.memory.logprob_chunk_tokens,
        dtype=dtype,
        packs=can_pack(config.model_dir, config.device, getattr(torch, config.dtype)),
    )


def _mesh(config: PolicyConfig, ranks: int) -> DeviceMesh:
    """All ranks; with several copies of the state (copies, ranks that share one), whose parameters are sharded over the
    last dimension."""
    copies = config.memory.policy_copies
    if copies == 1:
        return init_device_mesh(config.device, (ranks,))
    return init_device_mesh(config.device, (copies, ranks // copies), mesh_dim_names=("copy", "shard"))
