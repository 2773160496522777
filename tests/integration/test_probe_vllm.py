"""The probe in the process of a real vLLM engine."""

from __future__ import annotations

from pathlib import Path

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import read_evidence
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.config import engine_environment
from tests.unit.probe.probed_program import ProbedProgram

ENGINE = """
if __name__ == "__main__":
    from vllm import LLM
    LLM(model={model!r}, load_format="dummy", dtype="float32", max_model_len=2048, kv_cache_memory_bytes=1 << 17,
        enforce_eager=True)
"""


def test_an_engine_whose_own_process_lacks_memory_to_start_is_reported(tmp_path: Path) -> None:
    model = resolve_model("random://qwen3?hidden=64&layers=2&vocabulary=1000&dtype=float32")
    environment = engine_environment("cpu") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    program = ProbedProgram(tmp_path, environment)
    ended = program.run(ENGINE.format(model=str(model)))
    assert "Engine core initialization failed" in ended.errors, ended.errors
    assert program.message is not None
    assert program.message.evidence is not None
    assert "No available memory for the cache blocks" in program.message.message
    assert "in run_engine_core" in program.message.evidence.message
    assert diagnose(read_evidence(program.log))[0].failure_class is FailureClass.KV_CACHE_OVERSIZED
