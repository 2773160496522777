"""Sentences that report a shortage, in a text without any message of a program."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.mentions import reported_shortage

REPORTS = [
    "# [Bug] NPU out of memory when tp=2",
    "# [Bug]: NPU OOM when running benchmark",
    "CUDA OOM happens when the actor model is rolling out.",
    "It works for three steps. But, we are facing OOM at the fourth update step:",
    "# Ray worker OOM",
    "# Cuda Memory Error After Saving Checkpoint",
    "it becomes more than 10 Gb after 30 epochs, which leads to a memory error.",
    "总是在某个时间节点显存爆炸而导致程序终止，但依然会爆显存",
    "# CUDA显存不足",
    "# qwen2_5vl lora微调oom",
    "출력: GPU 메모리 부족",
    "При обучении не хватает памяти на видеокарте",
]


@pytest.mark.parametrize("sentence", REPORTS)
def test_a_report_in_a_sentence_is_quoted(sentence: str) -> None:
    assert reported_shortage(sentence)
    assert diagnoses_of(f"step 1\n{sentence}\nversion 2.1")


NO_REPORTS = [
    "change gpu_memory_utilization from 0.7 to 0.6 to avoid OOM",
    "Setting it to 0.7 would cause OOM for a node with 80G*8 VRAM.",
    "The max_length is large and this can cause OOM on small GPUs.",
    "The out-of-memory (OOM) error during training is usually due to insufficient space of the device.",
    "Regarding the OOM: Is it caused by updating too many weights at once?",
    "- Add configurable pipeline window (size=4) to manage memory and prevent OOM",
    "Add OOM detection for the trainer",
    "[INFO] Activation checkpointing enabled, OOM risk is low",
    "vm.panic_on_oom=0",
    "OOMScoreAdjust=-500",
    "[INFO] OOM killer disabled for this cgroup (oom_kill_disable=1)",
    "Warning: 4 out of 8 GPUs have insufficient memory bandwidth",
    "CUDA error: out-of-bounds memory access",
    "out of range memory access",
    "模型训练时显存溢出，通常是由于剩余显存不足以完成计算任务。",
    "+                if reason == 'OOMKilled':",
    "WARNING: Sequence group is preempted because there is not enough KV cache space to hold memory",
]


@pytest.mark.parametrize("sentence", NO_REPORTS)
def test_advice_questions_and_settings_are_no_reports(sentence: str) -> None:
    assert reported_shortage(sentence) is None
    assert diagnoses_of(f"step 1\n{sentence}\nversion 2.1") == []


def test_a_title_gives_way_to_a_programs_message() -> None:
    found = diagnoses_of("# GPU OOM when training\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0.")
    assert [each.failure_class for each in found] == [FailureClass.HOST_MEMORY]


def test_a_title_takes_the_activity_of_a_traceback_without_message() -> None:
    title = "# [Bug] CUDA OOM when DP attention is enabled\n"
    stack = (
        "Traceback (most recent call last):\n"
        '  File "/sglang/python/sglang/srt/model_executor/model_runner.py", line 1740, in init_memory_pool\n'
        "    self.token_to_kv_pool = MHATokenToKVPool(\n"
    )
    assert diagnoses_of(title + stack)[0].failure_class is FailureClass.KV_CACHE_OVERSIZED


def test_a_shortage_of_the_host_is_told_from_one_of_the_gpu() -> None:
    sentence = "I see {} OOM errors during the partitioning, which causes a crash before training begins."
    assert diagnoses_of(sentence.format("CPU"))[0].failure_class is FailureClass.HOST_MEMORY
    assert diagnoses_of(sentence.format("GPU"))[0].failure_class is FailureClass.UNKNOWN


def diagnoses_of(text: str) -> list[Diagnosis]:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode()))
    return diagnose(builder.build())
