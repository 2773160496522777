"""The stack of a failure names its activity, by families of names; with the ledger and the trend, its class."""

from __future__ import annotations

import pytest

from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.activity import Activity, activity_of
from tests.unit.memory.diagnosis.recorded import diagnoses_of, torch_message

TORCH = "/env/lib/python3.12/site-packages/torch"
VLLM = "/env/lib/python3.12/site-packages/vllm"
MODULE = f"{TORCH}/nn/modules/module.py"
RUNNER = f"{VLLM}/v1/worker/gpu_model_runner.py"
STATE_DICT = f"{TORCH}/distributed/fsdp/_state_dict_utils.py"
ZERO = "/env/site-packages/deepspeed/runtime/zero/partition_parameters.py"

STACKS = [
    # gathering, by its purpose
    (Activity.WEIGHT_SYNC, ["trainer.py in sync_policy_weights", f"{TORCH}/distributed/tensor/_api.py in full_tensor"]),
    (Activity.WEIGHT_SYNC, ["worker.py in push_params_to_engine", f"{MODULE} in state_dict"]),
    (Activity.WEIGHT_SYNC, ["grpo.py in _move_model_to_vllm", "peft/tuners_utils.py in merge_adapter"]),
    (Activity.CHECKPOINT, ["trainer.py in fsdp_save_ckpt", f"{STATE_DICT} in _full_pre_state_dict_hook"]),
    (Activity.GATHERING, ["export.py in main", f"{TORCH}/distributed/fsdp/api.py in summon_full_params"]),
    (Activity.FORWARD, ["parameter_coordinator.py in fetch_sub_module", f"{ZERO} in _all_gather"]),
    # an engine's start encloses its other activities
    (Activity.GRAPH_CAPTURE, [f"{RUNNER} in capture_model", f"{VLLM}/v1/utils.py in execute_model"]),
    (Activity.ENGINE_PROFILING, [f"{RUNNER} in profile_run", f"{RUNNER} in _dummy_run", f"{VLLM}/llama.py in forward"]),
    (Activity.ENGINE_PROFILING, [f"{RUNNER} in profile_run", f"{VLLM}/worker/model_runner.py in execute_model"]),
    (Activity.ENGINE_WARM_UP, [f"{VLLM}/v1/worker/gpu_worker.py in compile_or_warm_up", f"{RUNNER} in _dummy_run"]),
    (Activity.ENGINE_WARM_UP, [f"{RUNNER} in _dummy_sampler_run", f"{VLLM}/v1/sample/sampler.py in forward"]),
    (Activity.SAMPLING, [f"{RUNNER} in execute_model", f"{VLLM}/v1/sample/ops/topk.py in apply_top_k_top_p"]),
    # weights
    (Activity.MODEL_LOAD, ["run.py in main", f"{MODULE} in _apply", f"{MODULE} in convert"]),
    (Activity.MODEL_LOAD, [f"{VLLM}/v1/worker/gpu_worker.py in load_model", f"{VLLM}/linear.py in create_weights"]),
    (Activity.WEIGHT_SYNC, [f"{VLLM}/v1/worker.py in update_weights_from_ipc", f"{VLLM}/qwen3.py in load_weights"]),
    (Activity.MODEL_LOAD, ["transformers/modeling_utils.py in caching_allocator_warmup"]),
    (Activity.MODEL_LOAD, ["train.py in <module>", f"{TORCH}/nn/modules/linear.py in __init__"]),
    (Activity.MODEL_LOAD, ["bnb.py in replace", "/env/site-packages/bitsandbytes/nn/modules.py in cuda"]),
    # the optimizer, and a step that runs inside its closure
    (Activity.OPTIMIZER, ["fsdp_utils.py in load_fsdp_optimizer"]),
    (Activity.OPTIMIZER, ["train.py in main", "my_trainer/optimizers/muon.py in step"]),
    (Activity.OPTIMIZER, ["train.py in main", f"{TORCH}/nn/utils/clip_grad.py in _get_total_norm"]),
    (Activity.COLLECTING, ["transformers/trainer.py in evaluate", "transformers/trainer_pt_utils.py in nested_concat"]),
    (Activity.FORWARD, [f"{TORCH}/optim/adamw.py in step", "strategy.py in training_step", "x.py in forward"]),
    # modules that are built, shards that are taken back
    (Activity.MODEL_LOAD, [f"{VLLM}/layers/fused_moe/layer.py in __init__"]),
    (Activity.MODEL_LOAD, ["/env/sglang/srt/models/deepseek_v2.py in __init__"]),
    (Activity.MODEL_LOAD, ["peft/tuners/lora/layer.py in update_layer"]),
    (Activity.MODEL_LOAD, [f"{TORCH}/nn/parallel/distributed.py in __init__"]),
    (Activity.MODEL_LOAD, ["diffusers/pipelines/pipeline_utils.py in to"]),
    (Activity.MODEL_LOAD, ["fsdp_strategy.py in _fsdp_init_model"]),
    (Activity.MODEL_LOAD, ["demo.py in main", "model.load_state_dict(torch.load(path, map_location=device))"]),
    (
        Activity.MODEL_LOAD,
        ["point_e/models/download.py in load_checkpoint", f"{TORCH}/serialization.py in load_tensor"],
    ),
    # gradients on their way, logits by the names of functions, steps
    (Activity.BACKWARD, ["deepspeed/runtime/zero/stage3.py in __reduce_and_partition_ipg_grads"]),
    (Activity.BACKWARD, [f"{TORCH}/distributed/fsdp/_runtime_utils.py in _post_backward_hook"]),
    (Activity.LOGITS, ["openrlhf/models/utils.py in log_probs_from_logits"]),
    (Activity.LOGITS, ["slime/backends/megatron_utils/loss.py in get_log_probs_and_entropy"]),
    (Activity.OPTIMIZER, ["megatron/core/optimizer/optimizer.py in step_with_ready_grads"]),
    (Activity.OPTIMIZER, ["transformer_engine/pytorch/optimizers/fused_adam.py in initialize_state"]),
    (Activity.WEIGHT_SYNC, ["slime/backends/megatron_utils/update_weight_utils.py in all_gather_params_async"]),
    (Activity.GENERATION, ["x.py in forward", "transformers/cache_utils.py in update"]),
    (Activity.FORWARD, ["trainer.py in train_step"]),
    (Activity.FORWARD, ["diffusers/models/attention_processor.py in __call__"]),
    # host memory
    (Activity.PINNING, ["offload.py in offload", f"{TORCH}/utils/data/_utils/pin_memory.py in pin_memory"]),
]
CLASSES = {
    Activity.WEIGHT_SYNC: FailureClass.WEIGHT_SYNC_SPIKE,
    Activity.GATHERING: FailureClass.WEIGHT_SYNC_SPIKE,
    Activity.MODEL_LOAD: FailureClass.MODEL_WEIGHTS,
    Activity.GRAPH_CAPTURE: FailureClass.KV_CACHE_OVERSIZED,
    Activity.ENGINE_WARM_UP: FailureClass.KV_CACHE_OVERSIZED,
    Activity.SAMPLING: FailureClass.KV_CACHE_OVERSIZED,
    Activity.OPTIMIZER: FailureClass.OPTIMIZER_STATE,
    Activity.FORWARD: FailureClass.ACTIVATION_SPIKE,
}
"""Classes of a failure on a full GPU, by activity."""


def log_of(frames: list[str], *, process: float = 78.61) -> list[str]:
    """A traceback, and a failure on a GPU of which the process holds so many GiB."""
    parts = [frame.partition(" in ") for frame in frames]
    stack = [f'  File "{file}", line 1, in {function}' for file, _, function in parts]
    message = torch_message(1.16, total=79.11, free=0.45, process=process, allocated=process - 4, cached=0.09)
    return ["Traceback (most recent call last):", *stack, message]


@pytest.mark.parametrize(("activity", "frames"), STACKS, ids=[f"{a.name}-{f[-1].split()[-1]}" for a, f in STACKS])
def test_a_stack_has_its_activity_and_explains_a_full_gpu(activity: Activity, frames: list[str]) -> None:
    assert activity_of(frames) is activity
    if activity in CLASSES:
        assert diagnoses_of(*log_of(frames))[0].failure_class is CLASSES[activity]


@pytest.mark.parametrize("activity", [Activity.WEIGHT_SYNC, Activity.MODEL_LOAD, Activity.OPTIMIZER, Activity.FORWARD])
def test_the_largest_unexpected_item_outweighs_the_stack(activity: Activity) -> None:
    frames = next(frames for found, frames in STACKS if found is activity)
    assert diagnoses_of(*log_of(frames, process=28.61))[0].failure_class is FailureClass.FOREIGN_PROCESS


@pytest.mark.parametrize("activity", [Activity.WEIGHT_SYNC, Activity.OPTIMIZER, Activity.FORWARD])
def test_a_steady_climb_outweighs_the_stack(activity: Activity) -> None:
    frames = next(frames for found, frames in STACKS if found is activity)
    growing = [f"step {step} allocated: {20 + 4.5 * step:.2f} GiB, reserved: 78.00 GiB" for step in range(12)]
    best, *others = diagnoses_of(*growing, *log_of(frames))
    assert best.failure_class is FailureClass.RETAINED_GRAPH
    assert all(diagnosis.confidence <= 0.5 for diagnosis in others)
