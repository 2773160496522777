"""Settings of the roles, from the manifest and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.errors import BadInput
from rljob_trainer.hardware import Machine
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import max_concurrent_sequences, policy_ranks, require_supported, role_settings
from rljob_trainer.runtime.run_command import LocalPlacement

GIB = 2**30
PLAN = memory_plan(sync_bucket_bytes=GIB)
CPU = Machine(gpu_memory_bytes=(), host_memory_bytes=16 * GIB, cores=8)
TWO_GPUS = Machine(gpu_memory_bytes=(80 * GIB, 80 * GIB), host_memory_bytes=256 * GIB, cores=32)


def spec(**changes: dict[str, Any]) -> RLJobSpec:
    sections: dict[str, Any] = {
        "model": {"uri": "file:///model"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 5},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return RLJobSpec.model_validate(sections)


def settings(
    device: Any,
    machine: Machine,
    parameters: int = 10**9,
    allocator_environments: dict[Any, dict[str, str]] | None = None,
    **changes: dict[str, Any],
) -> Any:
    return role_settings(
        spec(**changes),
        PLAN,
        model_dir=Path("/model"),
        output_dir=Path("/out"),
        hosts=RoleHosts(machine, device, 1, "2.13.0", bundles=None, shared_memory_bytes=4 << 30, may_compile=True),
        parameters=parameters,
        allocator_environments=allocator_environments or {},
    )


def hosts_on(machine: Machine, monkeypatch: pytest.MonkeyPatch, **policy: int) -> RoleHosts:
    monkeypatch.setattr("rljob_trainer.runtime.run_command.this_machine", lambda **_: machine)
    return LocalPlacement(spec(policy=policy), "auto").survey(None, None)  # type: ignore[arg-type]


def test_one_rank_on_each_gpu_of_each_replica_and_one_in_a_replica_without() -> None:
    assert policy_ranks(spec(policy={"replicas": 2}).policy) == 2
    assert policy_ranks(spec(policy={"gpusPerReplica": 2}).policy) == 2
    assert policy_ranks(spec(policy={"replicas": 3, "gpusPerReplica": 0}).policy) == 3


def test_on_this_machine_each_rank_shares_its_gpu_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = hosts_on(TWO_GPUS, monkeypatch, gpusPerReplica=2)
    assert (hosts.device, hosts.ranks) == ("cuda", 2)
    assert hosts.bundles == ({"GPU": 1, "CPU": 2},) * 2


def test_a_machine_without_gpus_has_the_same_ranks_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = hosts_on(CPU, monkeypatch, gpusPerReplica=2)
    assert (hosts.device, hosts.ranks, hosts.bundles) == ("cpu", 2, None)


def test_more_ranks_than_gpus_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"expected 4 GPUs .* found 2"):
        hosts_on(TWO_GPUS, monkeypatch, replicas=4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topology": "Disaggregated"}, "write topology: Colocated"),
        (
            {"policy": {"gpusPerReplica": 2}, "rollout": {"tensorParallelSize": 2}},
            r"rollout\.tensorParallelSize: .* write 1",
        ),
    ],
)
def test_unsupported_topologies_are_refused_with_a_valid_value(changes: dict[str, Any], sentence: str) -> None:
    sections = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 5}}
    with pytest.raises(BadInput, match=sentence):
        require_supported(RLJobSpec.model_validate({**sections, **changes}))


def test_a_requested_gpu_that_is_missing_is_refused() -> None:
    with pytest.raises(BadInput, match="--device cpu"):
        CPU.choose_device("cuda")
    assert CPU.choose_device("auto") == "cpu"
    assert TWO_GPUS.choose_device("auto") == "cuda"


def test_layers_are_compiled_on_a_gpu_unless_torch_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert hosts_on(TWO_GPUS, monkeypatch).layers_compiled
    assert not hosts_on(CPU, monkeypatch).layers_compiled
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not hosts_on(TWO_GPUS, monkeypatch).layers_compiled


def test_auto_means_bfloat16_on_a_gpu_and_float32_on_a_cpu_for_both_roles() -> None:
    assert {settings("cuda", TWO_GPUS).policy.dtype, settings("cuda", TWO_GPUS).rollout.dtype} == {"bfloat16"}
    assert {settings("cpu", CPU).policy.dtype, settings("cpu", CPU).rollout.dtype} == {"float32"}
    assert settings("cuda", TWO_GPUS, model={"dtype": "float32"}).policy.dtype == "float32"


def test_both_roles_sample_and_score_at_the_same_temperature() -> None:
    both = settings("cpu", CPU, algorithm={"temperature": 0.7})
    assert both.policy.temperature == both.rollout.temperature == 0.7


def test_a_dual_clip_of_zero_is_no_bound() -> None:
    assert settings("cpu", CPU, algorithm={"dualClip": 0.0}).policy.loss.dual_clip is None


def test_the_engine_may_not_use_expandable_segments() -> None:
    made = settings("cuda", TWO_GPUS)
    assert made.rollout_environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert made.policy.memory.expandable_segments


def test_a_given_allocator_environment_replaces_the_default() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    made = settings("cuda", TWO_GPUS, allocator_environments={"policy": given, "rollout": {}})
    assert made.policy_environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made.rollout_environment


def test_tiny_models_get_one_thread_and_large_ones_the_cores() -> None:
    assert settings("cpu", CPU, parameters=156_000).policy_environment["OMP_NUM_THREADS"] == "1"
    assert settings("cpu", CPU).policy_environment["OMP_NUM_THREADS"] == "8"


def test_an_engine_generates_its_share_of_a_step_at_once_up_to_a_bound() -> None:
    assert max_concurrent_sequences(spec(algorithm={"promptsPerStep": 9, "groupSize": 4}), engines=2) == 20
    assert max_concurrent_sequences(spec(algorithm={"promptsPerStep": 512}), engines=1) == 256
    assert max_concurrent_sequences(spec(rollout={"maxConcurrentSequences": 3}), engines=1) == 3
