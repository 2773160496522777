"""Compiled code outlives its pod as one file, and costs nothing but itself if the volume is of no use."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_trainer.pods import compile_cache
from rljob_trainer.pods.code_platform import CodePlatform, flags_digest, this_platform
from rljob_trainer.pods.compile_cache import CompileCache, distrust, files_to_remove, is_kept_elsewhere
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.worker_pod import _restored_cache
from tests.unit.pods.pod_variables import pod_variables

NAME = "0123456789abcdef-policy"


def pod(directory: Path, number: int) -> CompileCache:
    """The cache of a new pod, with the same volume."""
    return CompileCache(directory / f"pod-{number}", directory / "volume", NAME)


def compile_in(cache: CompileCache, name: str, text: str = "code", *, seconds_ago: float = 3600) -> Path:
    file = cache.directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (time.time() - seconds_ago,) * 2)
    return file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A volume with the code of one pod."""
    first = pod(tmp_path, 1)
    assert first.restore().startswith("compiled code: none in ")
    compile_in(first, "inductor/fxgraph/a.py")
    message = first.save_if_settled()
    assert message is not None
    assert "kept in" in message
    return tmp_path


def test_the_next_pod_has_the_code_of_the_last_one(saved: Path) -> None:
    second = pod(saved, 2)
    assert "restored from" in second.restore()
    assert (second.directory / "inductor/fxgraph/a.py").read_text() == "code"
    assert second.save_if_settled() is None, "nothing is new"
    compile_in(second, "vllm/torch_compile_cache/b/model")
    restarted = pod(saved, 2)
    assert "kept in" in restarted.restore(), "a restart in place keeps the directory"
    assert restarted.save_if_settled() is not None, "the container before it had not saved its code"
    third = pod(saved, 3)
    third.restore()
    found = {str(path.relative_to(third.directory)) for path in third.directory.rglob("*") if path.is_file()}
    assert found == {"inductor/fxgraph/a.py", "vllm/torch_compile_cache/b/model"}
    (file,) = (saved / "volume").iterdir()
    for path, mode in ((file, 0o600), (file.parent, 0o700), (third.directory, 0o700)):
        assert path.stat().st_mode & 0o777 == mode, "only the owner can read or write"


def test_code_that_is_being_written_is_not_saved(tmp_path: Path) -> None:
    cache = pod(tmp_path, 1)
    cache.restore()
    compile_in(cache, "inductor/a.py", seconds_ago=0)
    assert cache.save_if_settled() is None
    compile_in(cache, "inductor/a.py")
    compile_in(cache, "inductor/.17.42.tmp", seconds_ago=0)
    compile_in(cache, "inductor/locks/a.lock", seconds_ago=0)
    assert cache.save_if_settled() is not None, "temporary files and locks do not count"
    second = pod(tmp_path, 2)
    second.restore()
    assert not list(second.directory.rglob("*.tmp"))


def test_code_that_others_may_have_written_is_not_used(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (saved / "volume").iterdir()
    assert distrust(file.stat()) is None
    file.chmod(0o606)
    assert "every user can write to it" in pod(saved, 2).restore()
    file.chmod(0o600)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    other = pod(saved, 3)
    assert f"user {user} owns it, not {user + 1}" in other.restore()
    assert not list(other.directory.iterdir())
    monkeypatch.undo()
    aside = file.rename(file.with_name("aside.tar"))
    file.symlink_to(aside)
    assert "is not used" in pod(saved, 4).restore()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "it is not a regular file" in pod(saved, 5).restore()


def test_the_file_that_was_checked_is_the_one_that_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (saved / "volume").iterdir()
    hostile = pod(saved / "hostile", 1)
    hostile.restore()
    compile_in(hostile, "inductor/fxgraph/a.py", "hostile")
    hostile.save_if_settled()

    def distrust_too_late(found: os.stat_result) -> str | None:
        answer = distrust(found)
        (saved / "hostile/volume" / file.name).replace(file)  # by another user, as whose file it would be refused
        return answer

    monkeypatch.setattr(compile_cache, "distrust", distrust_too_late)
    second = pod(saved, 2)
    second.restore()
    assert (second.directory / "inductor/fxgraph/a.py").read_text() == "code"


def test_an_unusable_volume_costs_only_the_cache(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (saved / "volume").iterdir()
    file.write_bytes(file.read_bytes()[:300])
    second = pod(saved, 2)
    assert "is not used" in second.restore()
    assert list(second.directory.iterdir()) == []
    assert list(second.directory.parent.iterdir()) == [second.directory], "a part of the code takes the pod's space"
    monkeypatch.setattr(compile_cache, "LIMIT_BYTES", 100)
    assert "larger than" in pod(saved, 4).restore()
    assert not list((saved / "volume").iterdir()), "a file that has grown too large is begun anew"
    monkeypatch.undo()
    (saved / "file").write_text("")
    third = CompileCache(saved / "pod-3", saved / "file" / "volume", NAME)
    third.restore()
    compile_in(third, "inductor/a.py")
    assert "is not kept" in (third.save_if_settled() or "")
    assert third.save_if_settled() is None, "a failure is reported once"


def test_the_least_recently_used_files_and_lost_partial_ones_are_removed(tmp_path: Path) -> None:
    now = time.time()
    for index in range(10):
        file = tmp_path / f"{index}-policy.tar"
        file.touch()
        os.utime(file, (now - index * 60,) * 2)
    for name, age in (("a.tar.1.partial", 7200), ("b.tar.2.partial", 5)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age,) * 2)
    removed = files_to_remove(tmp_path, tmp_path / "9-policy.tar", now)
    assert {file.name for file in removed} == {"a.tar.1.partial", "7-policy.tar", "8-policy.tar"}


def test_the_processes_of_a_worker_write_to_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    variables = pod_variables(tmp_path, RLJOB_INDEX="0", RLJOB_COMPILE_CACHE_DIR=str(tmp_path / "volume"))
    worker = WorkerEnvironment.read(variables)
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    for name in names:
        monkeypatch.setenv(name, "")
    cache = _restored_cache(worker)
    assert cache is not None
    assert {name: os.environ[name] for name in names} == cache.variables()
    assert all(Path(os.environ[name]).parent == cache.directory for name in names)
    assert cache.directory.name.endswith("-policy")
    assert is_kept_elsewhere(os.environ)
    assert _restored_cache(worker) is None, "the user's own directories are left alone"
    without = WorkerEnvironment.read(pod_variables(tmp_path, RLJOB_INDEX="0"))
    assert _restored_cache(without) is None


PLATFORM = CodePlatform(
    machine="x86_64",
    cpu_flags="a1",
    gpus=("NVIDIA H200 9.0",),
    versions=("python 3.11.9", "torch 2.11.0+cu129", "triton 3.6.0", "vllm 0.26.0"),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": "aarch64"},
        {"cpu_flags": "a2"},
        {"gpus": ("NVIDIA H100 80GB HBM3 9.0",)},
        {"gpus": ()},
        {"versions": ("python 3.11.9", "torch 2.13.0+cu129", "triton 3.6.0", "vllm 0.26.0")},
    ],
)
def test_anything_that_code_depends_on_changes_the_key(changes: dict[str, Any]) -> None:
    assert replace(PLATFORM, **changes).key != PLATFORM.key
    assert replace(PLATFORM).key == PLATFORM.key


def test_the_flags_of_a_cpu_count_and_not_its_cores_or_their_order() -> None:
    one = "processor\t: 0\ncpu MHz\t\t: 2400.1\nflags\t\t: fpu avx2 avx512f\n"
    two = one + "processor\t: 1\ncpu MHz\t\t: 800.0\nflags\t\t: avx2 fpu avx512f\n"
    assert flags_digest(one) == flags_digest(two)
    assert flags_digest(one) != flags_digest(one.replace(" avx512f", ""))
    assert flags_digest("Features\t: fp asimd sve\n") != flags_digest("Features\t: fp asimd\n")
    here = this_platform()
    assert here == this_platform()
    assert here.cpu_flags != flags_digest(""), "/proc/cpuinfo lists the CPU's instructions"
    assert {version.partition(" ")[0] for version in here.versions} >= {"python", "torch"}
