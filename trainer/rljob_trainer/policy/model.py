"""The policy as a module, from token ids to log-probabilities. Reads and shards it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rljob_trainer.algorithm.logprobs import chunked_logprobs
from rljob_trainer.errors import BadInput
from rljob_trainer.models.checkpoint import policy_weight_shapes, scaled_head_settings

CAUSAL_LM = "causal_lm."
"""Prefix of the parameter names in this module. The rest is the name in the Hugging Face checkpoint."""

_ASKS_FOR_LENGTHS = "triton.mix_order_reduction"  # torch 2.10 and newer


class PolicyModel(nn.Module):
    """A causal language model whose forward returns log-probabilities, so that logits never leave it.

    The head is applied within this forward, while FSDP has gathered its weight, which may be tied to the embedding.
    """

    def __init__(self, causal_lm: Any, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, input_ids: Tensor, hidden_rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each of `targets`, [T] float32.

        `input_ids`: [B, L], padded on the right. No mask is passed, so that attention uses its fast causal kernel.
        `hidden_rows`: [T], rows of the flattened [B × L] positions that predict the targets.
        """
        hidden = self.causal_lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return chunked_logprobs(
            hidden.flatten(0, 1).index_select(0, hidden_rows),
            self.causal_lm.get_output_embeddings().weight,
            targets,
            temperature=self._temperature,
            chunk_tokens=self.chunk_tokens,
        )

    @property
    def decoder_layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.causal_lm.base_model.layers
        return layers


def read_policy_model(model_dir: Path, *, temperature: float, chunk_tokens: int) -> PolicyModel:
    """The model in float32, on the CPU, in training mode, with dropout off.

    Raises `BadInput` if the model cannot be read, or if its head is not a single matrix.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_dir)
        for name, value in config.to_dict().items():
            # With dropout, the log-probabilities of policy and engine would differ.
            if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        causal_lm = AutoModelForCausalLM.from_pretrained(
            model_dir, config=config, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInput(f"cannot read a causal language model from {model_dir}: {error}") from error
    _require_plain_head(causal_lm, model_dir)
    _require_weights_of_checkpoint(causal_lm, model_dir)
    return PolicyModel(causal_lm.train(), temperature=temperature, chunk_tokens=chunk_tokens)


def checkpoint_activations(model: PolicyModel, *, enabled: bool) -> None:
    """Enable or disable activation checkpointing: layers keep only their input, and run again in backward."""
    if enabled:
        model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.causal_lm.gradient_checkpointing_disable()


def fuse_kernels(model: PolicyModel) -> None:
    """Compile each decoder layer, for GPUs: norms, rotary embedding and activation are fused into few kernels.

    This halves the time of an update and saves a third of its memory. Lengths are symbolic, so that a new length needs
    no compilation. One fusion depends on the length and is disabled: it recompiles a layer on each side of its
    thresholds, which takes 8 s on an H200 when a failed update is retried with smaller micro-batches.
    """
    from torch._inductor import list_options

    options: dict[str, Any] = {_ASKS_FOR_LENGTHS: False} if _ASKS_FOR_LENGTHS in list_options() else {}
    for layer in model.decoder_layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, options=options)


def shard(model: PolicyModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Apply FSDP2 over `mesh`: one group per decoder layer, one for the rest. Moves the parameters to its device.

    Parameters stay in float32; compute is in `dtype`; gradients are summed over the ranks in float32. A single rank
    that computes in float32 needs neither sharding nor casts, and is left unchanged.
    """
    if mesh.size() == 1 and dtype == torch.float32:
        model.to(mesh.device_type)
        return
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    for layer in model.decoder_layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def _require_plain_head(causal_lm: Any, model_dir: Path) -> None:
    changed = scaled_head_settings(causal_lm.config.to_dict())
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        changed.append("a bias in lm_head")
    if changed or not hasattr(causal_lm.base_model, "layers"):
        raise BadInput(
            f"expected decoder layers and logits = hidden · lm_head.weight in {model_dir}, "
            f"found {causal_lm.config.model_type} with {', '.join(changed) or 'no list of layers'}; "
            "use a model of the Qwen, Llama or Mistral kind"
        )


def _require_weights_of_checkpoint(causal_lm: Any, model_dir: Path) -> None:
    """Raise `BadInput` unless weights have the names and shapes of the checkpoint, by which the engine expects them."""
    own = {name: tuple(parameter.shape) for name, parameter in causal_lm.named_parameters()}
    expected = policy_weight_shapes(model_dir)
    if own != expected:
        differing = sorted(name for name in own.keys() | expected.keys() if own.get(name) != expected.get(name))
        raise BadInput(
            f"expected the weights of {model_dir} to keep names and shapes when transformers loads them, found "
            f"{len(differing)} others ({', '.join(differing[:3])}) in {causal_lm.config.model_type}; "
            "use a dense model of the Qwen, Llama or Mistral kind"
        )
