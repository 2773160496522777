"""What a forward or backward pass that raised leaves behind in FSDP2, and how to be rid of it.

FSDP ends a pass in a callback of autograd, which is not called when the pass raises: parameters stay gathered, with the
gradients of a half-done layer on them, and the next pass would take itself for a part of this one.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def forget_interrupted_pass(model: nn.Module) -> None:
    """Let the next pass begin as if the one that raised had not been; its gradients are lost.

    For a single rank: others may wait in a collective which this one will not enter. Takes no memory.
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
    """What `reset_iter_state` does, for torch before 2.13: mostly the callback that autograd left out."""
    state._state_ctx.iter_forward_root = None
    state._comm_ctx.all_gather_state = None
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
    state._root_post_backward_final_callback()
