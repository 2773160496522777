"""Configurations of jobs to compare with their predictions: a table, and a draw by a seed.

A draw depends on its seed, its number and the predictor alone, not on the machine: it asks the predictor only whether a
configuration is worth its time on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rljob_api.job import RLJobSpec
from rljob_memory.budget import Setup
from rljob_memory.hardware import GPU_TYPES, Hardware
from rljob_memory.model_shape import compute_bytes, shape_in_uri
from rljob_memory.plan import Choice, best_choice
from rljob_memory.sizes import GIB
from rljob_memory.workload import workload_of
from rljob_testing.plan_accuracy.jobs import GROUP_SIZE, SHORT_PROMPT, generating_job


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration."""

    model: str
    response_tokens: int = 1024
    prompts: int = 16
    """Prompts of a step, with 8 responses to each."""
    prompt_tokens: int = SHORT_PROMPT
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the spec, merged over the usual ones."""
    card_gib: int = 0
    """Another process holds all but this much of the GPU. 0: none does."""
    gpus: int = 1


def memory(**settings: Any) -> dict[str, Any]:
    return {"memory": settings}


KL, LORA = {"algorithm": {"klCoefficient": 0.01}}, {"policy": {"lora": {"rank": 16}}}
FP8, BFLOAT16 = {"rollout": {"quantization": "Fp8PerTensor"}}, {"policy": {"optimizer": {"moments": "bfloat16"}}}
TP = {"rollout": {"tensorParallelSize": 2}}
FOUR_TP = {"rollout": {"tensorParallelSize": 4}}

ARMS: dict[str, Arm] = {
    "8b": Arm("8b"),
    "4b-kl": Arm("4b", 512, changes=KL),
    "0.6b-2k": Arm("0.6b", 2048),
    "8b-lora": Arm("8b", changes=LORA),
    "4b-offload": Arm("4b", changes=memory(optimizerOffload="Enabled")),
    "0.6b-small-batches": Arm("0.6b", 512, changes=memory(microBatchTokens=2112, logprobChunkTokens=512)),
    "8b-80gib": Arm("8b", card_gib=79),
    "4b-fp8": Arm("4b", changes=FP8),
    "1.7b-40gib": Arm("1.7b", card_gib=40),
    "8b-bfloat16": Arm("8b", changes=BFLOAT16),
    "0.6b-32k": Arm("0.6b", 2048, prompts=1, prompt_tokens=30_720),
    "8b-lora-40gib": Arm("8b", 512, prompts=8, changes=LORA, card_gib=40),
    "8b-2gpus-tp2": Arm("8b", prompts=8, changes=TP, gpus=2),
    "32b-lora-4gpus-tp4": Arm("32b", 512, prompts=8, changes=LORA | FOUR_TP, gpus=4),
}
"""The first ten are those whose measurements the predictor was fitted to."""

IN_SAMPLE = frozenset(list(ARMS)[:10])

SMOKE = Arm("smoke", 16, prompt_tokens=64)

# --- the draw ---

MOST_STEP_SECONDS = 30.0
"""Predicted; configurations with longer steps are not drawn."""

MOST_HOST_BYTES_PER_GPU = 120 * GIB
"""Limit on the predicted host memory: four arms share a machine."""

MISSING_SHARE = 0.1
"""A configuration that lacks at most this part of the GPU by the prediction is drawn too: it is refused although it
may run. With more missing it cannot run."""

SPACE: Mapping[str, Mapping[Any, int]] = {
    "model": {"0.6b": 1, "1.7b": 1, "4b": 1, "8b": 1, "14b": 1, "32b": 1},
    "prompt_tokens": {SHORT_PROMPT: 8, 1024: 2, 4096: 2, 12_288: 1, 28_672: 1},
    "response_tokens": {512: 4, 1024: 4, 2048: 3, 4096: 2},
    "responses": {8: 1, 16: 1, 32: 2, 64: 3, 128: 3, 256: 1},
    "gpus": {1: 20, 2: 3, 4: 1},
    "card_gib": {0: 5, 79: 1, 40: 2},
    "tensor_parallel_size": {1: 2, 2: 1, 4: 1},
    "klCoefficient": {0.0: 3, 0.01: 1},
    "lora_rank": {0: 4, 16: 1, 64: 1},
    "moments": {"float32": 4, "bfloat16": 1, "int8": 1},
    "quantization": {"None": 4, "Fp8PerTensor": 1},
    "kvCacheDtype": {"Auto": 6, "Fp8": 1},
    "activationCheckpointing": {"Auto": 3, "Enabled": 1},
    "optimizerOffload": {"Auto": 3, "Enabled": 1, "Disabled": 1},
    "rolloutSleep": {"Auto": 5, "Level1": 1, "Disabled": 1},
    "microBatchTokens": {"Auto": 3, 4224: 1, 20_000: 1},
}
"""Values with their weights."""

MEMORY_SETTINGS = ("activationCheckpointing", "optimizerOffload", "rolloutSleep", "microBatchTokens")


def drawn(seed: int, count: int) -> dict[str, Arm]:
    """The first `count` configurations of this seed that are worth their time, by name."""
    source = random.Random(seed)
    arms: list[Arm] = []
    while len(arms) < count:
        arm = _one(source)
        if arm not in arms and is_worth_its_time(arm):
            arms.append(arm)
    return {f"seed-{seed}-{number:02}": arm for number, arm in enumerate(arms, start=1)}


def _one(source: random.Random) -> Arm:
    value = {name: source.choices(list(values), list(values.values()))[0] for name, values in SPACE.items()}
    one_gpu = value["gpus"] == 1
    policy: dict[str, Any] = {"optimizer": {"moments": value["moments"]}}
    if value["lora_rank"]:
        policy["lora"] = {"rank": value["lora_rank"]}
    rollout: dict[str, Any] = {"quantization": value["quantization"], "kvCacheDtype": value["kvCacheDtype"]}
    if not one_gpu:
        rollout["tensorParallelSize"] = min(value["tensor_parallel_size"], value["gpus"])
    # The plan of a card that is partly held is pinned.
    settings = () if value["card_gib"] and one_gpu else MEMORY_SETTINGS
    changes = {
        "algorithm": {"klCoefficient": value["klCoefficient"]},
        "policy": policy,
        "rollout": {name: chosen for name, chosen in rollout.items() if chosen not in ("None", "Auto")},
        "memory": {name: value[name] for name in settings if value[name] != "Auto"},
    }
    return Arm(
        value["model"],
        value["response_tokens"],
        -(-value["responses"] // GROUP_SIZE),
        value["prompt_tokens"],
        {name: section for name, section in changes.items() if section},
        value["card_gib"] if one_gpu else 0,
        value["gpus"],
    )


def is_worth_its_time(arm: Arm) -> bool:
    """True if the arm is valid, may run on an H100, and takes little time."""
    try:
        setup, choice = planned(arm)
    except ValidationError:
        return False
    host = choice.budget.peak("host") <= MOST_HOST_BYTES_PER_GPU * arm.gpus
    fits = choice.missing_bytes <= MISSING_SHARE * setup.hardware.device_memory_bytes
    return host and fits and choice.budget.seconds() <= MOST_STEP_SECONDS


# --- jobs and predictions ---


def spec_of(arm: Arm, steps: int, *, smoke: bool) -> dict[str, Any]:
    spec = generating_job(arm.model, steps, arm.prompts, arm.response_tokens, arm.prompt_tokens, smoke=smoke)
    changes = dict(arm.changes)
    if arm.gpus > 1:
        changes["policy"] = {**changes.get("policy", {}), "gpusPerReplica": arm.gpus}
    for section, values in changes.items():
        spec[section] = spec.get(section, {}) | values
    return spec


def planned(arm: Arm, gpu: str = "h100") -> tuple[Setup, Choice]:
    """The setup of an arm on this type of GPU, and its plan. Raises `ValidationError`."""
    spec = RLJobSpec.model_validate(spec_of(arm, 2, smoke=False), by_alias=True, by_name=False)
    shape = shape_in_uri(spec, compute_bytes(spec, "cuda"))
    assert shape is not None
    kind = GPU_TYPES[gpu]
    size = min(arm.card_gib * GIB, kind.memory_bytes) if arm.card_gib else kind.memory_bytes
    setup = Setup(workload_of(spec), shape, Hardware("cuda", size, 500 * GIB, gpu=gpu, layers_compiled=True))
    return setup, best_choice(spec.memory, setup)


def described(arm: Arm) -> str:
    """`4B, 64 × 2,048 tokens, KL term, adapters of rank 16, on 40 GiB`."""
    return ", ".join(_parts(arm))


def _parts(arm: Arm) -> Iterator[str]:
    yield arm.model.upper()
    before = "" if arm.prompt_tokens == SHORT_PROMPT else f"{arm.prompt_tokens:,} + "
    yield f"{GROUP_SIZE * arm.prompts} × {before}{arm.response_tokens:,} tokens"
    section = {name: dict(arm.changes.get(name, {})) for name in ("algorithm", "policy", "rollout", "memory")}
    if section["algorithm"].get("klCoefficient"):
        yield "KL term"
    if lora := section["policy"].get("lora"):
        yield f"adapters of rank {lora['rank']}"
    moments = section["policy"].get("optimizer", {}).get("moments", "float32")
    if moments != "float32":
        yield f"{moments} moments"
    for name, value in (*section["rollout"].items(), *section["memory"].items()):
        yield f"`{name}: {value}`"
    if arm.card_gib:
        yield f"on {arm.card_gib} GiB"
    if arm.gpus > 1:
        yield f"{arm.gpus} GPUs"
