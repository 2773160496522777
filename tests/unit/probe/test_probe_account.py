"""The probe's account of a failing process: stack, steps, engine, siblings; and the diagnosis that follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence, read_evidence
from rljob_memory.evidence.activity import Activity
from rljob_probe import account
from tests.unit.probe.probed_program import ProbedProgram

GIB = 1 << 30
FAIL = "torch.cuda.run_out_of_memory()"


def evidence_of(program: ProbedProgram, code: str) -> CollectedEvidence:
    program.run(code)
    assert program.message is not None
    return read_evidence(program.log)


def test_the_stack_of_a_failure_names_its_activity(gpu_program: ProbedProgram) -> None:
    code = f"import torch; torch.cuda.use()\ndef push_weights_to_vllm(): {FAIL}\npush_weights_to_vllm()"
    found = evidence_of(gpu_program, code).failure
    assert found is not None
    assert found.activity is Activity.WEIGHT_SYNC


def test_without_frames_the_stack_is_that_of_the_main_thread() -> None:
    assert account.places_of_frames(None)[0][2] == "places_of_frames"


STEPS = """
import sys, torch
torch.cuda.use()
sys.modules["rljob_probe.step_memory"].SECONDS_BETWEEN_SAMPLES = 0
optimizer = torch.optim.Optimizer()
for step in range(%d):
    torch.cuda.allocated = %s
    optimizer.step()
torch.cuda.run_out_of_memory()
"""


def test_a_steady_climb_over_the_steps_is_a_leak(gpu_program: ProbedProgram) -> None:
    evidence = evidence_of(gpu_program, STEPS % (90, "(1 << 30) + step * (60 << 20)"))
    [series] = evidence.series
    assert len(series.samples) == 32
    found = diagnose(evidence)[0]
    assert found.failure_class is FailureClass.RETAINED_GRAPH
    assert found.numbers["allocated_last_bytes"] == pytest.approx(GIB + 89 * (60 << 20), rel=0.01)


def test_steps_in_quick_succession_are_not_all_sampled(gpu_program: ProbedProgram) -> None:
    code = (STEPS % (50, "1 << 30")).replace("SECONDS_BETWEEN_SAMPLES = 0", "SECONDS_BETWEEN_SAMPLES = 1e9")
    [series] = evidence_of(gpu_program, code).series
    assert len(series.samples) == 2


ENGINE = """
import gc, sys, types, torch
torch.cuda.use()
sys.modules["vllm"] = types.ModuleType("vllm")

class Storage:
    def data_ptr(self): return id(self)
    def nbytes(self): return 5 << 29

class Tensor:
    storage = Storage()
    def untyped_storage(self): return self.storage

class GPUModelRunner: kv_caches = [Tensor(), Tensor()]
class UniProcExecutor: is_sleeping = %s

runner, executor = GPUModelRunner(), UniProcExecutor()
runner.kv_caches = [Tensor(), Tensor()]
gc.freeze()  # as vLLM does once an engine has started
torch.cuda.run_out_of_memory()
"""


def test_an_engine_awake_in_the_process_is_named(gpu_program: ProbedProgram) -> None:
    found = diagnose(evidence_of(gpu_program, ENGINE % False))[0]
    assert found.failure_class is FailureClass.ENGINE_NOT_ASLEEP
    assert found.numbers["kv_cache_bytes"] == 5 * GIB // 2


def test_an_engine_asleep_in_the_process_is_not_blamed(gpu_program: ProbedProgram) -> None:
    evidence = evidence_of(gpu_program, ENGINE % True)
    assert evidence.engine.asleep
    assert FailureClass.ENGINE_NOT_ASLEEP not in {found.failure_class for found in diagnose(evidence)}


def test_without_siblings_other_processes_are_foreign(gpu_program: ProbedProgram) -> None:
    evidence = evidence_of(gpu_program, f"import torch; torch.cuda.use(); {FAIL}")
    assert evidence.siblings == ()
    assert diagnose(evidence)[0].failure_class is FailureClass.FOREIGN_PROCESS


REFUSED = """
raise ValueError(
    "Free memory on device cuda:0 (59.60/139.80 GiB) on startup is less than desired GPU memory utilization "
    "(0.85, 118.83 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
"""


def test_an_engine_that_refuses_to_start_is_reported(program: ProbedProgram) -> None:
    package = program.directory / "site-packages" / "trl" / "trainer"
    package.mkdir(parents=True)
    (package / "grpo_trainer.py").write_text(REFUSED)
    evidence = evidence_of(program, f"import sys; sys.path.insert(0, {str(package)!r}); import grpo_trainer")
    found = diagnose(evidence)[0]
    assert found.failure_class is FailureClass.KV_CACHE_OVERSIZED
    assert "TRL: lower vllm_gpu_memory_utilization" in found.advice


def test_a_part_of_the_account_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_other_processes", lambda: 1 / 0)
    text = account.account([("/a/b.py", 3, "step")], torch=object())
    assert text == '  File "/a/b.py", line 3, in step'


def test_a_library_is_named_from_its_packages_on() -> None:
    file = str(Path("/very/long/environment/lib/python3.12/site-packages/torch/optim/adamw.py"))
    assert account._short(file) == "site-packages/torch/optim/adamw.py"
