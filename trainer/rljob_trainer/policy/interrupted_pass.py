"""Initializes FSDP2 before its first pass, resets it after a forward or backward pass that raised, and gives it the
process group of a new generation.

FSDP ends a pass in an autograd callback, which is not called if the pass raises. Parameters then stay gathered, with
the gradients of an incomplete layer. Without a reset, the next forward computes with these stale parameters, and the
callback never runs again, so that later losses are silently wrong.

The only module that uses FSDP2's private fields, of torch 2.11 and 2.13. A field that is missing raises
`AttributeError`: torch is pinned, and tests/integration/test_policy_ranks_recover.py runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

_PASS_ATTRIBUTES = (
    "_all_gather_result",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_all_reduce_state",
)


def initialize(model: nn.Module) -> None:
    """Find all modules that FSDP shards, which it otherwise does in the first pass of `model`. Not collective.

    A layer that the first pass leaves out would not be found. It would later become a root of its own, whose weights
    stay gathered from the forward to the backward pass. Does nothing if `model` is not sharded or has been initialized.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def forget_interrupted_pass(model: nn.Module) -> None:
    """Discard the failed pass and its gradients, so that the next pass starts cleanly. Allocates no memory.

    On a GPU, synchronize first. Only for a single rank, or after all ranks have left their collectives.
    """
    for module in _sharded(model):
        state = module._get_fsdp_state()
        _set(state, "_training_state", TrainingState.IDLE)
        state._modules_to_run_forward.clear()
        for group in _groups(state):
            _end_pass_of(group)
        _end_pass_of_root(state)


def leave_group(model: nn.Module) -> None:
    """Drop the references to the process group, which would otherwise stay connected."""
    for mesh_info, registry in _places_of_groups(model):
        for name in ("shard_process_group", "replicate_process_group"):
            if hasattr(mesh_info, name):
                _set(mesh_info, name, None)
        registry.clear()


def use_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Use `group` instead of the former group of the same name: FSDP keeps the group itself, its meshes keep the name.

    Raises `RuntimeError` if the names differ.
    """
    for mesh_info, registry in _places_of_groups(model):
        [name] = mesh_info.mesh._dim_group_names
        if name != group.group_name:
            raise RuntimeError(f"expected a process group with the name {name}, found {group.group_name}")
        _set(mesh_info, "shard_process_group", group)
        registry[name] = group


def _end_pass_of(group: Any) -> None:
    _set(group, "_training_state", TrainingState.IDLE)
    for name in _PASS_ATTRIBUTES:
        _set(group, name, None)
    group._post_forward_indices.clear()
    for parameter in group.fsdp_params:
        _set(parameter, "unsharded_accumulated_grad", None)
        if hasattr(parameter, "_unsharded_param"):  # it was gathered before
            parameter._unsharded_param.grad = None
    group.reshard()


def _end_pass_of_root(state: Any) -> None:
    _set(state._state_ctx, "iter_forward_root", None)
    _set(state._state_ctx, "post_backward_final_callback_queued", False)
    _set(state._state_ctx, "post_optim_event", None)
    communication = state._comm_ctx
    _set(communication, "all_gather_state", None)
    communication.post_forward_order.clear()
    if hasattr(communication, "reduce_scatter_states"):  # since torch 2.13
        communication.reduce_scatter_states.clear()
        communication._last_post_reduce_events.clear()
    else:
        _set(communication, "reduce_scatter_state", None)


def _places_of_groups(model: nn.Module) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each object with the cached process group, and the registry of its mesh, which torch 2.13 has."""
    for module in _sharded(model):
        for group in _groups(module._get_fsdp_state()):
            holders = [group, *group.fsdp_params]
            infos = [each for holder in holders for each in (holder.mesh_info, holder.post_forward_mesh_info) if each]
            for mesh_info in {id(each): each for each in infos}.values():
                yield mesh_info, getattr(mesh_info.mesh, "_pg_registry", {})


def _sharded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.12
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _set(owner: Any, name: str, value: object) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"expected torch's {type(owner).__name__} to have {name}; this torch is not supported")
    setattr(owner, name, value)
