"""Settings of the roles, from the manifest and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api.job import RLJob, RLJobSpec
from rljob_client.errors import BadInput
from rljob_memory.planning.job_workload import max_concurrent_sequences
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.hardware import Machine
from rljob_trainer.runtime.eight_bits import require_eight_bits, require_forms_installed
from rljob_trainer.runtime.job_run import identity
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import (
    policy_ranks,
    role_settings,
    rollout_engines,
)
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
        hosts=RoleHosts(
            machine, machine, device, 1, 1, "2.13.0", bundles=None, shared_memory_bytes=4 << 30, may_compile=True
        ),
        parameters=parameters,
        allocator_environments=allocator_environments or {},
    )


def test_adapters_get_all_linear_layers_unless_targets_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_trainer.runtime.role_settings.all_targets", lambda _model_dir: ("k_proj", "q_proj"))
    assert settings("cpu", CPU).policy.lora is None
    every = settings("cpu", CPU, policy={"lora": {}}).policy.lora
    assert (every.targets, every.rank, every.alpha, every.base_model) == (("k_proj", "q_proj"), 16, 32.0, "/model")
    of_hub: dict[str, Any] = {
        "model": {"uri": "hf://org/name"},
        "policy": {"lora": {"targets": ["v_proj"], "export": "Adapter"}},
    }
    some = settings("cpu", CPU, **of_hub).policy.lora
    assert (some.targets, some.export, some.base_model) == (("v_proj",), "Adapter", "org/name")


def test_other_adapters_are_another_job() -> None:
    def job(**lora: Any) -> RLJob:
        return RLJob.model_validate({"metadata": {"name": "a"}, "spec": spec(policy=lora).model_dump(by_alias=True)})

    assert "policy" not in identity(job())
    assert identity(job()).keys() == {"model", "task", "algorithm"}
    assert {"files", "cache"}.isdisjoint(identity(job())["task"] | identity(job())["model"])
    assert identity(job(lora={"rank": 8})) != identity(job(lora={"rank": 4}))
    assert identity(job(lora={"rank": 8})) == identity(job(lora={"rank": 8, "export": "Adapter"}))


def test_the_moments_have_the_type_of_the_manifest() -> None:
    assert settings("cpu", CPU, policy={"optimizer": {"moments": "int8"}}).policy.moments == "int8"


@pytest.mark.parametrize(
    ("rollout", "field", "default"),
    [({"quantization": "Fp8PerTensor"}, "quantization", "Disabled"), ({"kvCacheDtype": "Fp8"}, "kvCacheDtype", "Auto")],
)
def test_8_bits_are_refused_where_the_engine_or_the_gpu_has_none(
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
    monkeypatch.setattr("rljob_trainer.runtime.eight_bits.installed_values", lambda _argument: ["auto", "other"])
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
        assert policy_ranks(spec(policy=policy)) == rollout_engines(spec(policy=policy)) == ranks


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


def test_engines_of_their_own_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = hosts_on(TWO_GPUS, monkeypatch, rollout={})
    assert (hosts.device, hosts.ranks, hosts.engine_processes) == ("cuda", 1, 1)
    assert hosts.bundles == ({"GPU": 1, "CPU": 2},) * 2
    with pytest.raises(BadInput, match=r"expected 3 GPUs \(.* \+ rollout\.replicas × .*\), found 2"):
        hosts_on(TWO_GPUS, monkeypatch, rollout={"gpusPerReplica": 2})


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
    partial = {"promptsPerStep": 9, "groupSize": 4, "maxStaleness": 1, "partialRolloutPrompts": 2}
    apart = spec(algorithm={"promptsPerStep": 9}).model_dump(mode="json", by_alias=True, exclude_none=True)
    apart |= {"topology": "Disaggregated", "algorithm": apart["algorithm"] | partial}
    assert max_concurrent_sequences(RLJobSpec.model_validate(apart), engines=2) == 24, (
        "the groups that a step leaves count as well"
    )
    assert max_concurrent_sequences(spec(rollout={"maxConcurrentSequences": 3}), engines=1) == 3


def test_processes_of_an_engine_get_the_sequences_of_the_whole_engine() -> None:
    job: dict[str, Any] = {"policy": {"gpusPerReplica": 4}, "rollout": {"tensorParallelSize": 2}}
    job["algorithm"] = {"promptsPerStep": 8, "groupSize": 4}
    assert rollout_engines(spec(**job)) == 2
    made = settings("cpu", CPU, **job).rollout
    assert (made.tensor_parallel_size, made.max_num_seqs) == (2, 4 * 4)
