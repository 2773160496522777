"""Compiled code outlives its pod as one file, and costs nothing but itself if the volume is of no use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rljob_trainer.pods import compile_cache
from rljob_trainer.pods.compile_cache import (
    CompileCache,
    code_platform,
    cpu_instructions,
    distrust,
    files_to_remove,
    is_kept_elsewhere,
    platform_key,
)
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.worker_pod import _restored_cache
from tests.unit.pods.pod_variables import pod_variables

NAME = "0123456789abcdef-policy"


def pod(directory: Path, number: int) -> CompileCache:
    """The cache of a new pod, with the same volume."""
    return CompileCache(directory / f"pod-{number}", directory / "volume", NAME)


def compile_in(cache: CompileCache, name: str, text: str = "code", *, seconds_ago: float = 3600) -> None:
    file = cache.directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (time.time() - seconds_ago,) * 2)


def code_in(cache: CompileCache) -> dict[str, str]:
    files = [path for path in cache.directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(cache.directory)): path.read_text() for path in files}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file on the volume with the code of one pod."""
    first = pod(tmp_path, 1)
    assert first.restore().startswith("compiled code: none in ")
    compile_in(first, "inductor/a.py")
    assert "kept in" in (first.save_if_settled() or "")
    (file,) = (tmp_path / "volume").iterdir()
    return file


def test_the_next_pod_has_the_code_of_the_last_one(tmp_path: Path, saved: Path) -> None:
    second = pod(tmp_path, 2)
    assert "restored from" in second.restore()
    assert code_in(second) == {"inductor/a.py": "code"}
    assert second.save_if_settled() is None, "nothing is new"
    compile_in(second, "vllm/b/model")
    restarted = pod(tmp_path, 2)
    assert "kept in" in restarted.restore(), "a restart in place keeps the directory"
    assert restarted.save_if_settled() is not None, "the container before it had not saved its code"
    third = pod(tmp_path, 3)
    third.restore()
    assert code_in(third).keys() == {"inductor/a.py", "vllm/b/model"}
    for path, mode in ((saved, 0o600), (saved.parent, 0o700), (third.directory, 0o700)):
        assert path.stat().st_mode & 0o777 == mode, "only the owner can read or write"


def test_code_that_is_being_written_is_not_saved(tmp_path: Path) -> None:
    cache, following = pod(tmp_path, 1), pod(tmp_path, 2)
    cache.restore()
    compile_in(cache, "inductor/a.py", seconds_ago=0)
    assert cache.save_if_settled() is None
    compile_in(cache, "inductor/a.py")
    compile_in(cache, "inductor/.17.42.tmp", seconds_ago=0)
    compile_in(cache, "inductor/locks/a.lock", seconds_ago=0)
    assert cache.save_if_settled() is not None, "temporary files and locks do not count"
    following.restore()
    assert not [name for name in code_in(following) if name.endswith(".tmp")]


def test_code_that_others_may_have_written_is_not_used(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distrust(saved.stat()) is None
    saved.chmod(0o606)
    assert "every user can write to it" in pod(tmp_path, 2).restore()
    saved.chmod(0o600)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    other = pod(tmp_path, 3)
    assert f"user {user} owns it, not {user + 1}" in other.restore()
    assert code_in(other) == {}
    monkeypatch.undo()
    saved.symlink_to(saved.rename(saved.with_name("aside.tar")))
    assert "is not used" in pod(tmp_path, 4).restore()
    saved.unlink()
    os.mkfifo(saved, 0o600)
    assert "it is not a regular file" in pod(tmp_path, 5).restore()


def test_the_file_that_was_checked_is_the_one_that_is_read(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = pod(tmp_path / "hostile", 1)
    hostile.restore()
    compile_in(hostile, "inductor/a.py", "hostile")
    hostile.save_if_settled()

    def distrust_too_late(found: os.stat_result) -> str | None:
        answer = distrust(found)
        (tmp_path / "hostile/volume" / saved.name).replace(saved)  # by another user, whose file would be refused
        return answer

    monkeypatch.setattr(compile_cache, "distrust", distrust_too_late)
    second = pod(tmp_path, 2)
    second.restore()
    assert code_in(second) == {"inductor/a.py": "code"}


def test_an_unusable_volume_costs_only_the_cache(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.write_bytes(saved.read_bytes()[:300])
    second = pod(tmp_path, 2)
    assert "is not used" in second.restore()
    assert code_in(second) == {}
    assert list(second.directory.parent.iterdir()) == [second.directory], "a part of the code takes the pod's space"
    monkeypatch.setattr(compile_cache, "LIMIT_BYTES", 100)
    assert "larger than" in pod(tmp_path, 4).restore()
    assert not list(saved.parent.iterdir()), "a file that has grown too large is begun anew"
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    third = CompileCache(tmp_path / "pod-3", tmp_path / "file" / "volume", NAME)
    third.restore()
    compile_in(third, "inductor/a.py")
    assert "is not kept" in (third.save_if_settled() or "")
    assert third.save_if_settled() is None, "a failure is reported once"


def test_the_least_recently_used_files_and_lost_partial_ones_are_removed(tmp_path: Path) -> None:
    now = time.time()
    ages = {f"{index}-policy.tar": index * 60 for index in range(10)} | {"a.tar.1.partial": 7200, "b.tar.2.partial": 5}
    for name, seconds in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - seconds,) * 2)
    removed = files_to_remove(tmp_path, tmp_path / "9-policy.tar", now)
    assert {file.name for file in removed} == {"a.tar.1.partial", "7-policy.tar", "8-policy.tar"}


def test_the_processes_of_a_worker_write_to_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    worker = WorkerEnvironment.read(pod_variables(tmp_path, RLJOB_COMPILE_CACHE_DIR=str(tmp_path / "volume")))
    names = (
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    )
    for name in names:
        monkeypatch.setenv(name, "")
    cache = _restored_cache(worker)
    assert cache is not None
    assert {name: os.environ[name] for name in names} == cache.variables()
    assert {Path(os.environ[name]).parent for name in names} == {cache.directory}
    assert cache.directory.name.endswith("-policy")
    assert is_kept_elsewhere(os.environ)
    assert _restored_cache(worker) is None, "the user's own directories are left alone"
    assert _restored_cache(WorkerEnvironment.read(pod_variables(tmp_path))) is None


# --- the key of compiled code ---


def test_the_key_changes_with_anything_that_code_depends_on() -> None:
    here = code_platform()
    assert platform_key(here) == platform_key(code_platform())
    assert here["versions"].keys() >= {"python", "torch"}
    assert here["cpu instructions"], "/proc/cpuinfo lists the CPU's instructions"
    others = [
        here | {"machine": "s390x"},
        here | {"cpu instructions": here["cpu instructions"][1:]},
        here | {"gpus": ["NVIDIA H200 9.0"]},
        here | {"gpus": ["NVIDIA H100 80GB HBM3 9.0"]},
        here | {"versions": here["versions"] | {"torch": "0.1"}},
    ]
    assert len({platform_key(facts) for facts in (here, *others)}) == len(others) + 1


def test_the_instructions_of_a_cpu_count_and_not_its_cores_or_their_order() -> None:
    one = "processor\t: 0\ncpu MHz\t\t: 2400.1\nflags\t\t: fpu avx2 avx512f\n"
    two = one + "processor\t: 1\ncpu MHz\t\t: 800.0\nflags\t\t: avx2 fpu avx512f\n"
    assert cpu_instructions(one) == cpu_instructions(two) == ["avx2", "avx512f", "fpu"]
    assert cpu_instructions("Features\t: fp asimd sve\n") == ["asimd", "fp", "sve"]
