"""Predicted seconds of a step's phases against recorded ones, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.memory_plan import MemorySettings
from rljob_memory.budget import Setup, budget
from rljob_memory.budget.host import host_holds
from rljob_memory.engine_sizes import engine_sizes
from rljob_memory.fit import fit, with_gpus
from rljob_memory.hardware import GPU_TYPES, Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan import best_choice
from rljob_memory.sizes import GIB
from rljob_memory.workload import Workload
from rljob_testing.memory_plans import QWEN3_4B, QWEN3_8B, QWEN3_14B, QWEN3_32B, memory_plan

QWEN3_0_6B = ModelShape(596_000_000, 28, 1024, 8, 128, 151_936, 2, heads=16, intermediate=3072)
QWEN3_1_7B = ModelShape(1_720_000_000, 28, 2048, 8, 128, 151_936, 2, heads=16, intermediate=6144)
LONG_STEP = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1024)
TWO_ON_TWO = replace(LONG_STEP, policy_ranks=2, engines=1, tensor_parallel_size=2)
FOUR = replace(LONG_STEP, policy_ranks=4, engines=1, tensor_parallel_size=4)
FOUR_APART = replace(LONG_STEP, policy_ranks=4, engines=4)
FOUR_IN_PAIRS = replace(LONG_STEP, policy_ranks=4, engines=2, tensor_parallel_size=2)


def setup(model: ModelShape, work: Workload, gpu: str = "h200") -> Setup:
    hardware = Hardware("cuda", GPU_TYPES[gpu].memory_bytes, 512 * GIB, gpu=gpu, layers_compiled=True)
    return Setup(work, model, hardware)


@pytest.mark.parametrize(
    ("model", "work", "gpu", "settings", "rollout", "update"),
    [
        (QWEN3_0_6B, replace(LONG_STEP, max_response_tokens=512), "h200", {}, 3.5, 0.9),
        (QWEN3_1_7B, Workload(2, 8, 16, 16_000), "h200", {}, 93, 11),
        (QWEN3_4B, LONG_STEP, "h100", {"optimizerOffload": "Enabled"}, 9.1, 8.2),
        (QWEN3_8B, LONG_STEP, "h200", {"optimizerOffload": "Enabled"}, 9.4, 13.7),
        (replace(QWEN3_8B, adapter_parameters=43_646_976), LONG_STEP, "h200", {}, 9.5, 9.3),
        (QWEN3_14B, replace(LONG_STEP, moment_bytes=2), "h200", {}, 14.3, 23.6),
        (QWEN3_8B, TWO_ON_TWO, "h200", {}, 7.7, 7.3),
        (QWEN3_14B, replace(TWO_ON_TWO, moment_bytes=2), "h200", {}, 9.8, 15.6),
        (QWEN3_8B, FOUR_APART, "h200", {}, 6.1, 4.0),
        (QWEN3_14B, FOUR_APART, "h200", {}, 9.6, 6.8),
        (QWEN3_8B, FOUR_IN_PAIRS, "h200", {}, 4.9, 3.4),
        (QWEN3_14B, FOUR_IN_PAIRS, "h200", {}, 7.2, 6.4),
        (QWEN3_32B, replace(FOUR, moment_bytes=2), "h200", {}, 11.3, 17.0),
        (
            QWEN3_32B,
            replace(FOUR, moment_bytes=2),
            "h200",
            {"activationCheckpointing": "Disabled", "microBatchTokens": 1040, "optimizerOffload": "Disabled"},
            12.3,
            28.3,
        ),
    ],
)
def test_seconds_are_within_15_percent_of_recorded_ones(
    model: ModelShape, work: Workload, gpu: str, settings: dict[str, Any], rollout: float, update: float
) -> None:
    choice = best_choice(MemorySettings.model_validate(settings), setup(model, work, gpu))
    assert choice.budget.seconds("rollout") == pytest.approx(rollout, rel=0.15)
    assert choice.budget.seconds("update") == pytest.approx(update, rel=0.15)


def test_32b_on_four_gpus_recomputes_activations_rather_than_shrink_micro_batches() -> None:
    """Recorded: 42.9 to 49.9 s a step with 1,040 tokens and kept activations, 31.4 s with 8,192 and recomputation."""
    large = setup(QWEN3_32B, replace(FOUR, moment_bytes=2))
    choice = best_choice(MemorySettings(), large)
    assert choice.fits
    assert choice.plan.activation_checkpointing
    assert choice.plan.micro_batch_tokens == 8192
    assert not choice.plan.optimizer_offload
    kept = MemorySettings.model_validate({"activationCheckpointing": "Disabled", "optimizerOffload": "Disabled"})
    assert best_choice(kept, large).budget.seconds() > 1.3 * choice.budget.seconds()


def test_a_reference_model_on_the_host_passes_the_gpu_in_each_micro_batch() -> None:
    with_reference = setup(QWEN3_8B, replace(LONG_STEP, reference_model=True))
    seconds = [
        budget(with_reference, best_choice(MemorySettings(), with_reference).plan.model_copy(update=changed)).seconds()
        for changed in ({"optimizer_offload": True}, {"optimizer_offload": False})
    ]
    assert seconds[0] - seconds[1] > QWEN3_8B.weight_bytes / 40e9 * 10


def test_recomputed_activations_take_up_to_a_third_more_time_of_an_update() -> None:
    """One forward pass more (Chen et al. 2016); 0.59 s of 3.48 s in bench/results/memory_mitigation_cost.json."""
    one = setup(QWEN3_4B, LONG_STEP)
    plan = best_choice(MemorySettings(), one).plan
    kept, recomputed = (
        budget(one, plan.model_copy(update={"activation_checkpointing": on})).seconds("update") for on in (False, True)
    )
    assert 1.25 < recomputed / kept < 4 / 3


def test_phases_that_overlap_take_the_time_of_the_longer() -> None:
    apart = replace(LONG_STEP, topology="Disaggregated")
    in_turn, together = (
        best_choice(MemorySettings(), setup(QWEN3_4B, replace(apart, overlaps=overlaps))).budget
        for overlaps in (False, True)
    )
    rollout, update, sync = (in_turn.seconds(phase) for phase in ("rollout", "update", "sync"))
    assert in_turn.seconds() == pytest.approx(rollout + update + sync)
    assert together.seconds() == pytest.approx(max(rollout, update) + sync)


def test_smaller_updates_hold_fewer_tokens_and_take_an_optimizer_step_each() -> None:
    whole, parts = (setup(QWEN3_4B, replace(LONG_STEP, updates_per_step=count)) for count in (1, 32))
    plan = best_choice(MemorySettings(), whole).plan
    assert budget(parts, plan).bytes_of("activations", "gpu") < budget(whole, plan).bytes_of("activations", "gpu")
    assert budget(parts, plan).seconds("update") > budget(whole, plan).seconds("update")


def test_seconds_of_an_unnamed_gpu_are_those_of_the_closest_in_size() -> None:
    assert Hardware("cuda", 139 * GIB, 0).gpu_type.name == "h200"
    assert Hardware("cuda", 79 * GIB, 0, gpu="NVIDIA A100-SXM4-80GB").gpu_type.name == "a100-80"
    assert Hardware("cuda", 39 * GIB, 0, gpu="NVIDIA-A100-SXM4-40GB").gpu_type.name == "a100-40"
    assert Hardware("cuda", 79 * GIB, 0, gpu="NVIDIA H100 80GB HBM3").gpu_type.name == "h100"
    assert Hardware("cuda", 9 * GIB, 0, gpu="NVIDIA H100 80GB HBM3 MIG 1g.10gb").gpu_type.name == "l4", "no whole H100"
    assert Hardware("cpu", 0, GIB).gpu_type.name == "cpu"


@pytest.mark.parametrize(
    ("model", "ranks", "pods", "copies"),
    [(QWEN3_8B, 16, 2, 2), (QWEN3_8B, 8, 1, 1), (QWEN3_8B, 2, 2, 1), (QWEN3_32B, 4, 2, 1)],
    ids=["8b-on-two-pods", "one-pod", "pods-with-one-gpu", "32b-does-not-fit-twice"],
)
def test_each_pod_has_a_copy_of_the_state_if_that_fits(model: ModelShape, ranks: int, pods: int, copies: int) -> None:
    work = replace(LONG_STEP, prompts_per_step=64, policy_ranks=ranks, engines=ranks, policy_pods=pods)
    choice = best_choice(MemorySettings(), setup(model, work))
    assert choice.plan.policy_copies == copies
    if copies > 1:
        shared = choice.plan.model_copy(update={"policy_copies": 1})
        apart, together = (budget(setup(model, work), plan) for plan in (choice.plan, shared))
        assert apart.seconds("update") < together.seconds("update")
        assert apart.bytes_of("moments", "gpu") == copies * together.bytes_of("moments", "gpu")
        assert apart.bytes_of("checkpoints", "disk") == pytest.approx(together.bytes_of("checkpoints", "disk"))


def test_hosts_hold_every_copy_of_a_state_that_leaves_the_gpus() -> None:
    pods = setup(QWEN3_8B, replace(LONG_STEP, prompts_per_step=64, policy_ranks=16, engines=16, policy_pods=2))
    needed = []
    for copies in (1, 2):
        plan = memory_plan(policy_copies=copies, optimizer_offload=1.0)
        sizes = (replace(pods.hardware, host_memory_bytes=gib * GIB) for gib in range(2000))
        needed.append(next(each.host_memory_bytes for each in sizes if host_holds(replace(pods, hardware=each), plan)))
    assert needed[1] - needed[0] > 8 * QWEN3_8B.parameters


CHOSEN = replace(LONG_STEP, auto_engines=True)


def on_gpus(count: int, work: Workload = CHOSEN) -> Workload:
    return replace(work, policy_ranks=count, engines=count, max_concurrent_sequences=-(-16 // count) * 8)


@pytest.mark.parametrize(
    ("model", "gpus", "size"),
    [
        (QWEN3_8B, 4, 2),
        (QWEN3_8B, 2, 1),
        (QWEN3_8B, 1, 1),
        (QWEN3_14B, 2, 2),
        (QWEN3_32B, 4, 4),
        (QWEN3_0_6B, 4, 1),
    ],
)
def test_engines_have_more_gpus_where_that_is_noticeably_faster(model: ModelShape, gpus: int, size: int) -> None:
    """Measured with 8B: two engines of two GPUs are faster than four of one, and two of one than one of two."""
    choice = best_choice(MemorySettings(), setup(model, on_gpus(gpus)))
    assert choice.plan.tensor_parallel_size == size
    given = replace(on_gpus(gpus).with_engines_of(size), auto_engines=False)
    assert choice.plan == best_choice(MemorySettings(), setup(model, given)).plan, "as if the manifest had it"


@pytest.mark.parametrize(
    ("work", "model", "changes", "sizes"),
    [
        (on_gpus(8), QWEN3_8B, {}, [1, 2, 4, 8]),
        (on_gpus(6), QWEN3_8B, {}, [1, 2]),
        (replace(on_gpus(8), policy_pods=4, rollout_pods=4), QWEN3_8B, {}, [1, 2]),
        (replace(on_gpus(8), topology="Disaggregated", engines=4), QWEN3_8B, {}, [1, 2, 4]),
        (replace(on_gpus(8), auto_engines=False), QWEN3_8B, {}, [1]),
        (replace(on_gpus(8), auto_engines=False, engines=2, tensor_parallel_size=4), QWEN3_8B, {}, [4]),
        (on_gpus(8), QWEN3_8B, {"heads": 28, "kv_heads": 4}, [1, 2, 4]),
        (on_gpus(8), QWEN3_8B, {"heads": 32, "kv_heads": 4}, [1, 2, 4, 8]),
        (on_gpus(8), QWEN3_8B, {"intermediate": 12_290}, [1, 2]),
        (on_gpus(8), QWEN3_8B, {"intermediate": 11_008}, [1, 2, 4, 8]),
        (replace(on_gpus(8), quantized_weights=True), QWEN3_8B, {"intermediate": 11_008}, [1, 2]),
        (replace(on_gpus(8), quantized_weights=True), QWEN3_8B, {"hidden": 4160}, [1]),
    ],
)
def test_engines_fill_their_pods_and_divide_the_model(
    work: Workload, model: ModelShape, changes: dict[str, int], sizes: list[int]
) -> None:
    assert list(engine_sizes(setup(replace(model, **changes), work))) == sizes


def test_engines_on_cpus_have_one_process() -> None:
    assert list(engine_sizes(Setup(on_gpus(8), QWEN3_0_6B, Hardware("cpu", 0, 64 * GIB)))) == [1]


def test_a_plan_decides_about_the_engines_that_the_manifest_leaves_open() -> None:
    """Plans of earlier versions have no size, and a number in the manifest holds for them."""
    pairs = memory_plan(tensor_parallel_size=2)
    assert setup(QWEN3_8B, on_gpus(4)).under(pairs).work.engines == 2
    assert setup(QWEN3_8B, on_gpus(4)).under(pairs).work.max_concurrent_sequences == 64
    assert setup(QWEN3_8B, on_gpus(4)).under(memory_plan()).work.engines == 4
    assert setup(QWEN3_8B, FOUR_IN_PAIRS).under(memory_plan()).work == FOUR_IN_PAIRS
    too_large = memory_plan(tensor_parallel_size=16)  # as a trainer may report it, which runs the user's code
    assert budget(setup(QWEN3_8B, on_gpus(4)), too_large).seconds() > 0


@pytest.mark.parametrize(
    ("size", "gpus", "faster"), [(1, 4, 2), (4, 4, 2), (2, 4, None), (2, 2, None), (1, 2, None), (None, 4, None)]
)
def test_a_number_of_the_manifest_is_compared_with_what_auto_would_choose(
    size: int | None, gpus: int, faster: int | None
) -> None:
    work = on_gpus(gpus)
    given = work if size is None else replace(work.with_engines_of(size), auto_engines=False)
    found = fit(MemorySettings(), setup(QWEN3_8B, given)).faster_tensor_parallel_size()
    assert (found and found[0]) == faster


@pytest.mark.parametrize("memory", [{}, {"optimizerOffload": "Disabled"}])
@pytest.mark.parametrize("model", [QWEN3_8B, QWEN3_32B])
@pytest.mark.parametrize("gib", [40, 80, 141])
def test_advice_on_gpus_is_that_of_all_sizes_of_engines(model: ModelShape, gib: int, memory: dict[str, Any]) -> None:
    """Only the smallest and the largest engines are tried, on more GPUs than were too few."""
    settings = MemorySettings.model_validate(memory)
    card = setup(model, replace(on_gpus(4), max_response_tokens=16_384))
    card = replace(card, hardware=replace(card.hardware, device_memory_bytes=gib * GIB))
    counts = (1, 2, 4, 8, 16, 32, 64)
    expected = next((count for count in counts if fit(settings, with_gpus(card, count)).lack is None), None)
    assert fit(settings, card).fewest_gpus() == expected
