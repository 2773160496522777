"""The stack of a failure names its activity, by families of names; with the ledger and the trend, its class."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.activity import Activity, activity_of
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

TORCH = "/env/lib/python3.12/site-packages/torch"
VLLM = "/env/lib/python3.12/site-packages/vllm"
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 462.56 MiB is free. Including non-PyTorch memory, this process has 78.61 GiB memory in use. Of the "
    "allocated memory 74.57 GiB is allocated by PyTorch, and 92.46 MiB is reserved by PyTorch but unallocated."
)
BESIDE_OTHERS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 462.56 MiB is free. Including non-PyTorch memory, this process has 28.61 GiB memory in use. Of the "
    "allocated memory 27.57 GiB is allocated by PyTorch, and 92.46 MiB is reserved by PyTorch but unallocated."
)

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
    (
        Activity.FORWARD,
        [f"{TORCH}/optim/adamw.py in step", "strategy.py in training_step", "x.py in forward"],
    ),
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


@pytest.mark.parametrize(("expected", "frames"), STACKS, ids=[f"{a.name}-{f[-1].split()[-1]}" for a, f in STACKS])
def test_a_stack_has_its_activity(expected: Activity, frames: list[str]) -> None:
    assert activity_of(frames) is expected


def read(*lines: str) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO("\n".join(lines).encode()))
    return builder.build()


def traceback_of(frames: list[str]) -> list[str]:
    parts = [frame.partition(" in ") for frame in frames]
    stack = [f'  File "{file}", line 1, in {function}' for file, _, function in parts]
    return ["Traceback (most recent call last):", *stack]


def log_of(frames: list[str], message: str) -> CollectedEvidence:
    return read(*traceback_of(frames), message)


def best(evidence: CollectedEvidence) -> Diagnosis:
    return diagnose(evidence)[0]


@pytest.mark.parametrize(
    ("activity", "expected"),
    [
        (Activity.WEIGHT_SYNC, FailureClass.WEIGHT_SYNC_SPIKE),
        (Activity.GATHERING, FailureClass.WEIGHT_SYNC_SPIKE),
        (Activity.MODEL_LOAD, FailureClass.MODEL_WEIGHTS),
        (Activity.GRAPH_CAPTURE, FailureClass.KV_CACHE_OVERSIZED),
        (Activity.ENGINE_WARM_UP, FailureClass.KV_CACHE_OVERSIZED),
        (Activity.SAMPLING, FailureClass.KV_CACHE_OVERSIZED),
        (Activity.OPTIMIZER, FailureClass.OPTIMIZER_STATE),
        (Activity.FORWARD, FailureClass.ACTIVATION_SPIKE),
    ],
)
def test_a_full_gpu_is_explained_by_the_stack(activity: Activity, expected: FailureClass) -> None:
    for frames in [frames for found, frames in STACKS if found is activity]:
        assert best(log_of(frames, FULL)).failure_class is expected, frames


@pytest.mark.parametrize("activity", [Activity.WEIGHT_SYNC, Activity.MODEL_LOAD, Activity.OPTIMIZER, Activity.FORWARD])
def test_the_largest_unexpected_item_outweighs_the_stack(activity: Activity) -> None:
    frames = next(frames for found, frames in STACKS if found is activity)
    assert best(log_of(frames, BESIDE_OTHERS)).failure_class is FailureClass.FOREIGN_PROCESS


def growing(steps: int = 12) -> list[str]:
    return [f"step {step} allocated: {20 + 4.5 * step:.2f} GiB, reserved: 78.00 GiB" for step in range(steps)]


@pytest.mark.parametrize("activity", [Activity.WEIGHT_SYNC, Activity.OPTIMIZER, Activity.FORWARD])
def test_a_steady_climb_outweighs_the_stack(activity: Activity) -> None:
    frames = next(frames for found, frames in STACKS if found is activity)
    found = diagnose(read(*growing(), *traceback_of(frames), FULL))
    assert found[0].failure_class is FailureClass.RETAINED_GRAPH
    assert all(diagnosis.confidence <= 0.5 for diagnosis in found[1:])


IPYTHON = (
    "OutOfMemoryError                          Traceback (most recent call last)",
    "Cell In[48], line 1",
    "File ~/venv/lib/python3.10/site-packages/ludwig/api.py:619, in LudwigModel.train(self, dataset, training_set)",
    "    616     detected_learning_rate = get_auto_learning_rate(self.config_obj)",
    "File ~/venv/lib/python3.10/site-packages/torch/nn/modules/module.py:1143, in Module.to.<locals>.convert(t)",
)
OLDER_IPYTHON = (
    "/usr/local/lib/python3.7/dist-packages/torch/nn/modules/module.py in convert(t)",
    "--> 605  t.to(device)",
)
RICH = (
    "╭───────────────────── Traceback (most recent call last) ─────────────────────╮",
    "│ /home/me/lib/python3.10/site-packages/torch/nn/modules/module.py:820 in     │",
    "│ _apply                                                                      │",
    "│ ❱  820 │   │   │   param_applied = fn(param)                                │",
    "│ /home/me/lib/python3.10/site-packages/torch/nn/modules/module.py:1143 in convert │",
)


@pytest.mark.parametrize("traceback", [IPYTHON, OLDER_IPYTHON, RICH], ids=["IPython", "older IPython", "rich"])
def test_tracebacks_of_notebooks_and_rich_have_frames(traceback: tuple[str, ...]) -> None:
    found = best(read(*traceback, FULL.removeprefix("torch.")))
    assert found.failure_class is FailureClass.MODEL_WEIGHTS


@pytest.mark.parametrize(
    "code",
    [
        "│ ❱ 253 │   │   attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32). │",
        "--> 253         attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)",
    ],
)
def test_numbered_code_above_a_message_shows_the_pass(code: str) -> None:
    found = best(read(code, "│   254 │   │   attn_output = torch.matmul(attn_weights, value_states) │", FULL))
    assert found.failure_class is FailureClass.ACTIVATION_SPIKE


def test_pinning_host_memory_is_no_full_gpu() -> None:
    frames = next(frames for found, frames in STACKS if found is Activity.PINNING)
    assert best(log_of(frames, "RuntimeError: CUDA error: out of memory")).failure_class is FailureClass.HOST_MEMORY


def test_the_advice_for_an_engines_weights_is_its_parallelism() -> None:
    frames = [f"{VLLM}/v1/worker/gpu_worker.py in load_model", f"{VLLM}/linear.py in create_weights"]
    assert best(log_of(frames, FULL)).advice == "vLLM: set tensor_parallel_size: 1 → 2, or a quantized model."


COMFYUI = """Error occurred when executing KSampler:

Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated : 13.74 GiB
Requested : 640.00 MiB
Device limit : 14.75 GiB
Free (according to CUDA): 27.06 MiB
PyTorch limit (set by user-supplied memory fraction)
: 17179869184.00 GiB

File "D:\\ComfyUI\\execution.py", line 151, in recursive_execute
output_data, output_ui = get_output_data(obj, input_data_all)
File "D:\\ComfyUI\\python\\Lib\\site-packages\\torch\\nn\\modules\\module.py", line 1527, in _call_impl
return forward_call(*args, **kwargs)
"""


@pytest.mark.parametrize(("limit", "is_one"), [("14.00 GiB", True), ("17179869184.00 GiB", False)])
def test_the_limit_of_the_async_allocator_is_the_last_line_of_its_message(limit: str, is_one: bool) -> None:
    log = (
        COMFYUI.replace("14.75 GiB", "24.00 GiB").replace("27.06 MiB", "9.00 GiB").replace("17179869184.00 GiB", limit)
    )
    found = best(read(*log.splitlines()))
    assert (found.failure_class is FailureClass.GPU_MEMORY_LIMIT) == is_one


def test_a_traceback_below_its_message_counts() -> None:
    evidence = read(*COMFYUI.splitlines())
    assert evidence.failure is not None
    assert evidence.failure.device is not None
    assert evidence.failure.device.allowed_bytes is None
    assert evidence.failure.activity is Activity.FORWARD
    assert best(evidence).failure_class is FailureClass.ACTIVATION_SPIKE


def test_a_traceback_of_a_later_error_explains_no_earlier_one() -> None:
    later = [*traceback_of(["x.py in save_checkpoint"]), "ValueError: something else"]
    evidence = read(FULL, *later)
    assert evidence.failure is not None
    assert evidence.failure.activity is None


def test_a_file_system_without_space_is_dev_shm_where_memory_is_shared() -> None:
    frames = ["train.py in main", "/usr/lib/python3.12/multiprocessing/shared_memory.py in __init__"]
    error = "OSError: [Errno 28] No space left on device"
    assert best(log_of(frames, error)).failure_class is FailureClass.SHARED_MEMORY
    assert diagnose(log_of(["train.py in write_log"], error)) == []


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("The replica workerpool0-0 ran out-of-memory and exited with a non-zero status.", FailureClass.HOST_MEMORY),
        ("ERROR: container killed: memory limit exceeded", FailureClass.HOST_MEMORY),
        ("FrobnicatorError: the accelerator ran out of device memory at layer 7", FailureClass.UNKNOWN),
    ],
)
def test_an_unfamiliar_report_about_a_container_is_host_memory(report: str, expected: FailureClass) -> None:
    assert best(read(report)).failure_class is expected
