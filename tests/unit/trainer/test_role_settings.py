"""Settings of the roles, from the manifest and the GPUs of the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api.job import RLJob, RLJobSpec
from rljob_api.roles import LoraSpec
from rljob_api.topology import worker_pods
from rljob_client.errors import BadInput
from rljob_memory.workload import max_concurrent_sequences
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.hardware import Machine, gpus_beginning_with, this_machine, visible_gpus
from rljob_trainer.rollout.config import SEES_ALL_GPUS
from rljob_trainer.runtime.job_run import identity
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.requirements import require_eight_bits, require_forms_installed
from rljob_trainer.runtime.role_settings import role_settings
from rljob_trainer.runtime.run_command import LocalPlacement

GIB = 2**30
CPU = Machine(gpu_memory_bytes=(), host_memory_bytes=16 * GIB, cores=8)
TWO_GPUS = Machine(gpu_memory_bytes=(80 * GIB, 80 * GIB), host_memory_bytes=256 * GIB, cores=32)


def spec(**changes: dict[str, Any]) -> RLJobSpec:
    sections: dict[str, Any] = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}}
    sections["algorithm"] = {"steps": 5}
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return RLJobSpec.model_validate(sections)


def settings(
    machine: Machine = CPU,
    parameters: int = 10**9,
    environments: Any = None,
    processes: int = 1,
    tensor_parallel_size: int = 1,
    **changes: Any,
) -> Any:
    """Settings of so many ranks and processes of engines on `machine`, under a plan with engines of that size.

    `environments`: those of the allocator, by role.
    """
    device: Any = "cuda" if machine.gpu_memory_bytes else "cpu"
    hosts = RoleHosts(
        machine, machine, device, processes, processes, "2.13.0", (), shared_memory_bytes=4 << 30, may_compile=True
    )
    return role_settings(
        spec(**changes),
        memory_plan(tensor_parallel_size=tensor_parallel_size),
        model_dir=Path("/model"),
        output_dir=Path("/out"),
        hosts=hosts,
        parameters=parameters,
        allocator_environments=environments or {},
    )


def test_adapters_get_all_linear_layers_unless_targets_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_trainer.runtime.role_settings.all_targets", lambda _model_dir: ("k_proj", "q_proj"))
    assert settings().policy.lora is None
    every = settings(policy={"lora": {}}).policy
    assert (every.lora, every.base_model) == (LoraSpec(targets=["k_proj", "q_proj"]), "/model")
    given = {"targets": ["v_proj"], "export": "Adapter"}
    some = settings(model={"uri": "hf://org/name"}, policy={"lora": given}).policy
    assert (some.lora, some.base_model) == (LoraSpec.model_validate(given), "org/name")


def test_other_adapters_are_another_job() -> None:
    def of(**lora: Any) -> Any:
        given = spec(policy=lora).model_dump(by_alias=True)
        return identity(RLJob.model_validate({"metadata": {"name": "a"}, "spec": given}))

    assert of() != of(lora={}), "with the defaults"
    assert {"files", "cache"}.isdisjoint(of()["task"] | of()["model"])
    assert of(lora={"rank": 8}) != of(lora={"rank": 4})
    assert of(lora={"rank": 8}) == of(lora={"rank": 8, "export": "Adapter"})


@pytest.mark.parametrize(
    ("rollout", "field", "default"),
    [({"quantization": "Fp8PerTensor"}, "quantization", "Disabled"), ({"kvCacheDtype": "Fp8"}, "kvCacheDtype", "Auto")],
)
def test_8_bits_are_refused_without_support_in_engine_and_gpu(
    rollout: dict[str, str], field: str, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = spec(rollout=rollout)
    with pytest.raises(BadInput, match=rf"rollout\.{field}: expected {default}, because vLLM on the CPU has no 8-bit"):
        require_eight_bits(wanted, "cpu", None)
    with pytest.raises(BadInput, match=rf"rollout\.{field}: expected {default} on a GPU of compute capability 8\.0"):
        require_eight_bits(wanted, "cuda", (8, 0))
    require_eight_bits(wanted, "cuda", (9, 0))
    require_eight_bits(wanted, "cuda", None)
    require_eight_bits(spec(), "cpu", None)
    require_forms_installed(wanted)
    monkeypatch.setattr("rljob_trainer.runtime.requirements.installed_values", lambda _argument: ["auto", "other"])
    with pytest.raises(BadInput, match=rf"rollout\.{field}: expected a form .*; write {default}, or install the vLLM"):
        require_forms_installed(wanted)
    require_forms_installed(spec())
    with pytest.raises(ValidationError, match=r"importanceSampling\.mode must not be Disabled"):
        spec(rollout=rollout, algorithm={"importanceSampling": {"mode": "Disabled"}})


def hosts_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, int] | None = None, **policy: int
) -> RoleHosts:
    """`rollout`: of a disaggregated job; None: the job is colocated."""
    monkeypatch.setattr("rljob_trainer.runtime.run_command.this_machine", lambda **_: machine)
    job = spec(policy=policy)
    if rollout is not None:
        apart = {"topology": "Disaggregated", "rollout": rollout}
        job = RLJobSpec.model_validate(job.model_dump(by_alias=True, exclude_unset=True) | apart)
    return LocalPlacement("auto").survey(job, None, None)  # type: ignore[arg-type]


def test_one_rank_on_each_gpu_of_each_replica_and_one_in_a_replica_without() -> None:
    for policy, ranks in (({"replicas": 2}, 2), ({"gpusPerReplica": 2}, 2), ({"replicas": 3, "gpusPerReplica": 0}, 3)):
        job = spec(policy=policy)
        assert worker_pods(job)[0].processes == worker_pods(job)[-1].processes == ranks


def test_ranks_and_engines_are_placed_on_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(machine: Machine, rollout: dict[str, int] | None = None, **policy: int) -> tuple[Any, ...]:
        hosts = hosts_on(machine, monkeypatch, rollout, **policy)
        return hosts.device, hosts.ranks, hosts.engine_processes, hosts.bundles

    on_two_gpus = ({"GPU": 1, "CPU": 2},) * 2
    assert placed(TWO_GPUS, gpusPerReplica=2) == ("cuda", 2, 2, on_two_gpus), "each shared with an engine"
    assert placed(TWO_GPUS, rollout={}) == ("cuda", 1, 1, on_two_gpus), "one for each"
    assert placed(CPU, gpusPerReplica=2) == ("cpu", 2, 2, ({"CPU": 2},) * 2)


def test_more_processes_than_gpus_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"expected 4 GPUs .* found 2"):
        hosts_on(TWO_GPUS, monkeypatch, replicas=4)
    with pytest.raises(BadInput, match=r"expected 3 GPUs \(.* \+ rollout\.replicas × .*\), found 2"):
        hosts_on(TWO_GPUS, monkeypatch, rollout={"gpusPerReplica": 2})
    with pytest.raises(BadInput, match="--device cpu"):
        CPU.choose_device("cuda")


def test_layers_are_compiled_on_a_gpu_unless_torch_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert hosts_on(TWO_GPUS, monkeypatch).layers_compiled
    assert not hosts_on(CPU, monkeypatch).layers_compiled
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not hosts_on(TWO_GPUS, monkeypatch).layers_compiled


def test_both_roles_have_the_settings_of_the_manifest() -> None:
    for machine, dtype in ((TWO_GPUS, "bfloat16"), (CPU, "float32")):
        assert settings(machine).policy.dtype == settings(machine).rollout.dtype == dtype, "Auto"
    assert settings(TWO_GPUS, model={"dtype": "float32"}).policy.dtype == "float32"
    changed = settings(algorithm={"temperature": 0.7, "dualClip": 0.0}, policy={"optimizer": {"moments": "int8"}})
    assert changed.policy.algorithm.temperature == changed.rollout.algorithm.temperature == 0.7
    assert changed.policy.moments == "int8"
    assert changed.policy.algorithm.dual_clip == 0


def test_each_role_has_its_own_environment() -> None:
    made = settings(TWO_GPUS)
    assert made.rollout_environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert made.policy.memory.expandable_segments
    assert SEES_ALL_GPUS not in made.rollout_environment
    shared = settings(TWO_GPUS, processes=2, tensor_parallel_size=2)
    assert SEES_ALL_GPUS in shared.rollout_environment
    assert SEES_ALL_GPUS not in shared.policy_environment
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    made = settings(TWO_GPUS, environments={"policy": given, "rollout": {}})
    assert made.policy_environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made.rollout_environment
    for parameters, threads in ((156_000, "1"), (10**9, "8")):  # a tiny model, and a large one
        assert settings(parameters=parameters).policy_environment["OMP_NUM_THREADS"] == threads


def test_an_engine_generates_its_share_of_a_step_at_once_up_to_a_bound() -> None:
    few = {"promptsPerStep": 9, "groupSize": 4}
    assert max_concurrent_sequences(spec(algorithm=few), engines=2) == 20
    assert max_concurrent_sequences(spec(algorithm={"promptsPerStep": 512}), engines=1) == 256
    apart = spec(algorithm=few).model_dump(mode="json", by_alias=True, exclude_none=True)
    apart |= {"topology": "Disaggregated"}
    apart["algorithm"] |= {"maxStaleness": 1, "partialRolloutPrompts": 2}
    assert max_concurrent_sequences(RLJobSpec.model_validate(apart), engines=2) == 24, "with the groups that it leaves"
    assert max_concurrent_sequences(spec(rollout={"maxConcurrentSequences": 3}), engines=1) == 3


def test_processes_of_an_engine_get_the_sequences_of_the_whole_engine() -> None:
    algorithm = {"promptsPerStep": 8, "groupSize": 4}
    made = settings(processes=4, tensor_parallel_size=2, algorithm=algorithm).rollout
    assert (made.tensor_parallel_size, made.max_num_seqs) == (2, 4 * 4)


UUIDS = ["GPU-8f1c2b1e-1111-2222-3333-444455556666", "GPU-0f1c2b1e-1111-2222-3333-444455556666"]
MIG = "MIG-9c0d0a1b-aaaa-bbbb-cccc-ddddeeeeffff"
MEMORY = {UUIDS[0]: 80 * GIB, UUIDS[1]: 40 * GIB, MIG: 10 * GIB}


@pytest.fixture(params=[None])
def visible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """CUDA_VISIBLE_DEVICES, on a machine with two GPUs and a part of one."""

    class NVMLError(Exception):
        pass

    def by_uuid(uuid: str) -> str:
        if uuid not in MEMORY:
            raise NVMLError
        return uuid

    nvml: Any = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: UUIDS[index],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200" if handle == UUIDS[0] else "NVIDIA A100",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=MEMORY[handle]),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0) if handle == UUIDS[0] else (8, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", request.param or "")
    if request.param is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    value: str | None = request.param
    return value


@pytest.mark.parametrize(
    ("visible", "gib", "capability"),
    [
        (None, (80, 40), (8, 0)),  # the lowest
        ("0", (80,), (9, 0)),
        ("1, 0", (40, 80), (8, 0)),
        (f"{UUIDS[1]},{UUIDS[0]}", (40, 80), (8, 0)),
        ("GPU-0f1c", (40,), (8, 0)),
        (MIG, (10,), (8, 0)),
        ("", (), None),
        ("-1", (), None),
        ("0,-1,1", (80,), (9, 0)),
        ("NoDevFiles", (), None),
    ],
    indirect=["visible"],
)
def test_visible_gpus_are_found_by_every_name(
    visible: str | None, gib: tuple[int, ...], capability: tuple[int, int] | None
) -> None:
    machine = this_machine()
    assert machine.gpu_memory_bytes == tuple(n * GIB for n in gib)
    assert machine.gpu_capability == capability
    assert machine.choose_device("auto") == ("cuda" if gib else "cpu")
    if visible is None:  # text with every version of the bindings
        assert [gpu.name for gpu in visible_gpus()] == ["NVIDIA H200", "NVIDIA A100"]


@pytest.mark.parametrize(
    ("visible", "own", "expected"),
    [(None, "1", "1,0"), ("1,0", "0", "0,1"), (f"{UUIDS[0]},{UUIDS[1]}", UUIDS[1], f"{UUIDS[1]},{UUIDS[0]}")],
    indirect=["visible"],
)
def test_the_own_gpu_comes_first_and_all_others_follow(visible: str | None, own: str, expected: str) -> None:
    assert gpus_beginning_with(own) == expected


@pytest.mark.parametrize("visible", ["2", "cuda:0", "GPU-ffff", "GPU-", "MIG-ffff"], indirect=True)
def test_a_name_of_no_gpu_is_refused_unless_the_cpu_is_chosen(visible: str) -> None:
    with pytest.raises(BadInput, match=f"indices below 2.*found '{visible}'.*nvidia-smi -L"):
        this_machine()
    assert this_machine(gpus=False).gpu_memory_bytes == ()
