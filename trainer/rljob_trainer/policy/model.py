"""The policy as a module, from token ids to log-probabilities. Builds and shards it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from rljob_client.errors import BadInput
from rljob_client.model_dimensions import ADVICE
from rljob_client.model_files import files_of_weights, read_config
from rljob_trainer.algorithm.logprobs import chunked_logprobs
from rljob_trainer.models.checkpoint import policy_weight_shapes
from rljob_trainer.models.consistency import scaled_head_settings
from rljob_trainer.policy import packed_attention, packed_kernel
from rljob_trainer.policy.interrupted_pass import initialize
from rljob_trainer.policy.lora import checkpoint_name
from rljob_trainer.policy.optimizer_state import split
from rljob_trainer.policy.weight_loading import PIECE_ELEMENTS, parameters_on_meta, rows_of

CAUSAL_LM = "causal_lm."
"""Prefix of the parameter names in this module. The rest is the name in the Hugging Face checkpoint."""


class PolicyModel(nn.Module):
    """A causal language model whose forward returns log-probabilities, so that logits never leave it.

    The head is applied within this forward, while FSDP has gathered its weight, which may be tied to the embedding.
    """

    def __init__(self, causal_lm: Any, *, temperature: float, chunk_tokens: int, packs: bool = False) -> None:
        """`packs`: the attention of `causal_lm` is `packed_attention`, which takes packed sequences and no padding."""
        super().__init__()
        self.packs = packs
        has_window = getattr(causal_lm.config, "sliding_window", None) is not None
        self.shares_prompts = packs and packed_kernel.can_share_prompts and not has_window
        self.causal_lm = causal_lm
        self._temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        input_ids: Tensor,
        hidden_rows: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        sizes: Sequence[int] = (),
        **bounds: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each of `targets`, [T] float32.

        `input_ids`: [B, L], padded on the right. No mask is passed, so that attention uses its fast causal kernel.
        `hidden_rows`: [T], rows of the flattened [B × L] positions that predict the targets. With packed sequences,
        B = 1, and the other arguments are those of `packing_of`.
        """
        packing: dict[str, Any] = {}
        if position_ids is not None:
            packing = {"position_ids": position_ids, "sizes": torch.tensor(sizes), **bounds}
        hidden = self.causal_lm.base_model(input_ids=input_ids, use_cache=False, **packing).last_hidden_state
        return chunked_logprobs(
            hidden.flatten(0, 1).index_select(0, hidden_rows),
            self.causal_lm.get_output_embeddings().weight,
            targets,
            temperature=self._temperature,
            chunk_tokens=self.chunk_tokens,
        )

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Leave out all but the first layer of each kind of attention."""
        initialize(self)
        layers, base = self.decoder_layers, self.causal_lm.base_model
        first = {getattr(layer, "attention_type", None): layer for layer in reversed(layers)}
        base.layers = nn.ModuleList(reversed(first.values()))
        try:
            yield
        finally:
            base.layers = layers

    @property
    def decoder_layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.causal_lm.base_model.layers
        return layers


def sent_name(parameter_name: str) -> str:
    """The name in the Hugging Face checkpoint."""
    return checkpoint_name(parameter_name.removeprefix(CAUSAL_LM))


def build_policy_model(
    model_dir: Path,
    *,
    temperature: float,
    chunk_tokens: int,
    dtype: torch.dtype = torch.float32,
    packs: bool = False,
) -> PolicyModel:
    """The model with parameters in `dtype` on the meta device, in training mode, with dropout off: no weight is read.

    `packs`: it takes packed sequences. Raises `BadInput` if the model cannot be read, or if its head is not a single
    matrix.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    packed_attention.register()
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        for name, value in config.to_dict().items():
            # With dropout, the log-probabilities of policy and engine would differ.
            if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        with parameters_on_meta():
            causal_lm = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=packed_attention.NAME if packs else "sdpa",
                trust_remote_code=False,
            )
    except MemoryError:
        raise
    except Exception as error:  # transformers checks a configuration with any type of exception
        raise BadInput(
            f"cannot build a causal language model from {model_dir / 'config.json'}: "
            f"{type(error).__name__}: {error}; correct the file, or {ADVICE}"
        ) from error
    _require_kind_of_engine(causal_lm, model_dir)
    _require_plain_head(causal_lm, model_dir)
    _require_weights_of_checkpoint(causal_lm, model_dir)
    _require_tied_head(causal_lm, model_dir)
    return PolicyModel(causal_lm.train(), temperature=temperature, chunk_tokens=chunk_tokens, packs=packs)


def checkpoint_activations(model: PolicyModel, *, enabled: bool) -> None:
    """Enable or disable activation checkpointing: layers keep only their input, and run again in backward."""
    if enabled:
        model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.causal_lm.gradient_checkpointing_disable()


def to_compute_dtype(model: PolicyModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast trainable float32 parameters to `dtype`. Returns the remainder of each by name (`optimizer_state.split`), in
    the parameter's shape; empty for float32.

    For a parameter on the meta device, the remainder is a meta tensor, which `load_weights` fills.
    """
    remainders: dict[str, Tensor] = {}
    if dtype == torch.float32:
        return remainders
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.data, remainders[name] = split(parameter.data)
    return remainders


def shard(model: PolicyModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Apply FSDP2 over `mesh`: one group per decoder layer, one for the rest. Parameters on the meta device stay there;
    all other tensors move to the device of the mesh.

    Parameters keep their dtype; compute is in `dtype`; gradients are summed over the ranks in float32. A single rank
    needs no sharding: its parameters must have the dtype of its compute.
    """
    if mesh.size() == 1:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(mesh.device_type))
        return
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    for layer in model.decoder_layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def keep_on_host(model: PolicyModel, mesh: DeviceMesh) -> None:
    """Keep the parameters of a frozen model in pinned host memory. Each layer is on the GPU while it runs.

    Parameters on the meta device are to be loaded to the CPU. FSDP pins them before its first pass.
    """
    offload = CPUOffloadPolicy(pin_memory=True)
    for layer in model.decoder_layers:
        fully_shard(layer, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)


def _require_kind_of_engine(causal_lm: Any, model_dir: Path) -> None:
    """Raise `BadInput` unless the class that transformers derives from `model_type` is the one that vLLM looks up."""
    name, architectures = type(causal_lm).__name__, read_config(model_dir)["architectures"]
    if name.casefold() not in {each.casefold() for each in architectures}:  # LLaMAForCausalLM is an old spelling
        raise BadInput(
            f'expected architectures: ["{name}"] in {model_dir / "config.json"}, as its model_type '
            f"{causal_lm.config.model_type} requires, found {', '.join(architectures)}: policy and engine would build "
            f"different models; correct the file, or {ADVICE}"
        )


def _require_plain_head(causal_lm: Any, model_dir: Path) -> None:
    changed = scaled_head_settings(causal_lm.config.to_dict())
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        changed.append("a bias in lm_head")
    if changed or not hasattr(causal_lm.base_model, "layers"):
        raise BadInput(
            f"expected decoder layers and logits = hidden · lm_head.weight in {model_dir}, "
            f"found {causal_lm.config.model_type} with {', '.join(changed) or 'no list of layers'}; {ADVICE}"
        )


def _require_weights_of_checkpoint(causal_lm: Any, model_dir: Path) -> None:
    """Raise `BadInput` unless weights have the names and shapes of the checkpoint, by which the engine expects them."""
    own = {name: tuple(parameter.shape) for name, parameter in causal_lm.named_parameters()}
    expected = policy_weight_shapes(model_dir)
    if own != expected:
        differing = sorted(name for name in own.keys() | expected.keys() if own.get(name) != expected.get(name))
        raise BadInput(
            f"expected the weights of {model_dir} to keep names and shapes when transformers loads them, found "
            f"{len(differing)} others ({', '.join(differing[:3])}) in {causal_lm.config.model_type}; {ADVICE}"
        )


def _require_tied_head(causal_lm: Any, model_dir: Path) -> None:
    """Raise `BadInput` if the files have a head of their own, with other values, although it is tied."""
    files, head, embedding = files_of_weights(model_dir), "lm_head.weight", causal_lm.get_input_embeddings().weight
    if head not in files or causal_lm.get_output_embeddings().weight is not embedding:
        return
    name = next(name for name, parameter in causal_lm.named_parameters() if parameter is embedding)
    rows, width = embedding.shape
    for first in range(0, rows, step := max(1, PIECE_ELEMENTS // width)):
        stop = min(first + step, rows)
        if not torch.equal(rows_of(files[head], head, first, stop), rows_of(files[name], name, first, stop)):
            raise BadInput(
                f"expected {head} to equal {name} in {model_dir}, whose config.json has tie_word_embeddings: true, "
                "found other values; write tie_word_embeddings: false in it"
            )


VARIANTS = 64
"""Most variants of a layer. torch's default of 8 is reached by legal settings: one sequence or several, with gradient
or without, with activation checkpointing, and the same again for the reference model."""

_OPTIONS: dict[str, Any] = {"triton.mix_order_reduction": False}
"""Switches off the fusion that depends on the length: it would recompile a layer on each side of its thresholds, which
takes 8 s on an H200 when a failed update is retried with smaller micro-batches."""


def compile_layers(layers: Iterable[nn.Module], **how: Any) -> None:
    """Compile the forward of each layer: norms, rotary embedding and activation are fused into few kernels.

    This halves the time of an update and saves a third of its memory. Lengths are symbolic, so that a new length needs
    no compilation.

    A layer that cannot be compiled again raises an error: uncompiled, it would save 34 instead of 22 numbers for each
    hidden unit and run at half the speed.

    Each further compilation is logged with its reason. `how`: arguments of torch.compile instead of the options above.
    """
    from torch._dynamo import config
    from torch._functorch import config as gradient_config
    from torch._logging._internal import set_logs

    layers = list(layers)
    config.recompile_limit = max(config.recompile_limit, VARIANTS)
    # Of all layers and of two models, the policy and its reference, which may share one code object.
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * VARIANTS * len(layers))
    config.fail_on_recompile_limit_hit = True
    # torch's default would derive the gradients again in each new process, because of the functions of `gradient_sums`.
    gradient_config.autograd_cache_allow_custom_autograd_functions = True
    set_logs(recompiles=True)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, **(how or {"options": _OPTIONS}))


def compilations() -> int:
    """Number of graphs that this process has compiled so far. Does not import the compiler."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters["stats"]["unique_graphs"] if counters else 0
