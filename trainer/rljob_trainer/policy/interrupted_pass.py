"""Resets FSDP2 after a forward or backward pass that raised.

FSDP ends a pass in an autograd callback, which is not called if the pass raises. Parameters then stay gathered, with
the gradients of an incomplete layer, and the next pass would be treated as part of the failed one.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def forget_interrupted_pass(model: nn.Module) -> None:
    """Discard the failed pass and its gradients, so that the next pass starts cleanly. Allocates no memory.

    Only for a single rank: others may wait in a collective that this one will not enter.
    """
    if not isinstance(model, FSDPModule):
        return
    state = model._get_fsdp_state()
    for group in filter(None, (each._fsdp_param_group for each in state._state_ctx.all_states)):
        _drop_gathered_gradients(group)
    if hasattr(model, "reset_iter_state"):  # since torch 2.13
        model.reset_iter_state()
    else:
        _end_pass(state)


def _drop_gathered_gradients(group: Any) -> None:
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # it was gathered before
            parameter._unsharded_param.grad = None


def _end_pass(state: Any) -> None:
    """The equivalent of `reset_iter_state` for torch before 2.13: mainly the callback that was not called."""
    state._state_ctx.iter_forward_root = None
    state._comm_ctx.all_gather_state = None
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
    state._root_post_backward_final_callback()
