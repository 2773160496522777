"""Checkpoints of the policy restore bit for bit; transformers loads its exports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from rljob_api.roles import LoraSpec
from rljob_client.errors import BadInput
from rljob_trainer.ledger.checkpoint_manifest import MANIFEST_NAME, describe, digest_of
from rljob_trainer.policy import checkpoint_files, checkpoint_layout
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.host_array import HostArray
from rljob_trainer.policy.rank import PolicyRank
from tests.integration.policy_processes import (
    RankProcesses,
    before_each_piece,
    complete_checkpoint,
    parameters,
    policy_config,
    policy_processes,
    scored_batch,
    state_of,
    sweep,
    tiny_config,
    tiny_model,
    token_logprobs,
    written_checkpoint,
)


def weights_after(policy: RankProcesses, *steps: int) -> str:
    """The state of `policy` after these updates."""
    for step in steps:
        policy.call("update", scored_batch(step))
    return state_of(policy)


def use_small_pieces(_policy: PolicyRank) -> None:
    """In a policy process: several files for a tiny model, and several pieces for each of its matrices."""
    checkpoint_files.FILE_BYTES = 16 << 10
    checkpoint_layout.PIECE_BYTES = 4 << 10


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("ranks", [1, 2])
def test_damage_is_found_while_loading_and_another_checkpoint_loads(tmp_path: Path, ranks: int) -> None:
    """Also if other ranks had written it. Every rank learns of it."""
    config = tiny_config(tmp_path, learning_rate=1e-2)
    with policy_processes(2, config) as policy:
        policy.run(use_small_pieces)
        at_first = weights_after(policy, 1)
        first = written_checkpoint(policy, tmp_path / "first")
        weights_after(policy, 2)
        second = tmp_path / "second"
        policy.call("start_checkpoint", second)
        digests = complete_checkpoint(policy, second)
        assert digests == {each.name: digest_of(each) for each in second.glob("__*")}
    sizes = [digest.size_bytes for digest in digests.values()]
    assert max(sizes) < 2 * min(sizes), "the files share the state evenly"
    files = sorted(digests)
    assert {each[:4] for each in files} == {"__0_", "__1_"}
    assert len(files) >= 4
    with policy_processes(ranks, config) as policy:
        for name in files[1], files[-1]:
            intact = (second / name).read_bytes()
            flip_a_bit(second / name)
            assert policy.call("load_checkpoint", second) == [f"{name} is corrupt (its checksum differs)"] * ranks
            (second / name).write_bytes(intact[:-100])
            assert policy.call("load_checkpoint", second) == [f"{name} is corrupt (its checksum differs)"] * ranks
            (second / name).unlink()
            missing = f"{name} cannot be read (No such file or directory)"
            assert policy.call("load_checkpoint", second) == [missing] * ranks
            (second / name).write_bytes(intact)
        assert policy.call("load_checkpoint", first) == [None] * ranks
        assert weights_after(policy) == at_first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_loads_into_another_number_of_ranks(tmp_path: Path, dtype: str) -> None:
    """One rank has bfloat16 weights with remainders, two have float32 shards: the masters are the same bits."""
    config = tiny_config(tmp_path, dtype=dtype, learning_rate=1e-2)
    last, expected, continued = None, "", ""
    for ranks in (1, 2, 3, 1):
        with policy_processes(ranks, config) as policy:
            policy.run(use_small_pieces)
            if last is None:
                expected = weights_after(policy, 1)
            else:
                assert policy.call("load_checkpoint", last) == [None] * ranks
                assert weights_after(policy) == expected
            last = written_checkpoint(policy, tmp_path / f"of-{ranks}-after-{last and last.name}")
            if ranks == 1:
                continued, before = weights_after(policy, 2), continued
    assert continued == before, "the moments are the same bits, too"


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """It has one file a rank and one item a tensor, as torch writes them by default."""
    config = tiny_config(tmp_path, learning_rate=1e-2)
    directory = tmp_path / "checkpoint"
    with policy_processes(2, config) as policy:
        expected = weights_after(policy, 1)
        policy.run(save_as_before, directory)
        (directory / MANIFEST_NAME).write_bytes(describe(directory, 1, {}).to_json())
        assert {each.name for each in directory.glob("__*")} == {"__0_0.distcp", "__1_0.distcp"}
        continued = weights_after(policy, 2)
    for ranks in (2, 1):
        with policy_processes(ranks, config) as policy:
            assert policy.call("load_checkpoint", directory) == [None] * ranks
            assert weights_after(policy) == expected
            if ranks == 2:
                assert weights_after(policy, 2) == continued


def save_as_before(policy: PolicyRank, directory: Path) -> None:
    optimizer = policy._optimizer
    state = checkpoint_layout.as_saved(optimizer, checkpoint_layout.local_state(optimizer))
    save(state, storage_writer=FileSystemWriter(directory))


def test_writing_in_place_and_loading_take_memory_for_pieces_alone(tmp_path: Path) -> None:
    """Masters of all weights would take 4 bytes each, all of the state 12."""
    parameters_ = 12_000_000
    model_dir = tiny_model(tmp_path / "model", vocabulary=parameters_ // 2 // 256, hidden_size=256)
    config = policy_config(model_dir, tmp_path / "run", dtype="bfloat16", checkpoint_copy=False)
    with policy_processes(1, config) as policy:
        policy.run(use_pieces_of_256_kib)
        directory = written_checkpoint(policy, tmp_path / "checkpoint")
        policy.call("load_checkpoint", directory)  # touches the state's memory for the first time
        assert policy.run(added_memory_of_loading, directory)[0] < parameters_
        assert policy.run(added_memory_of_writing, tmp_path / "another")[0] < parameters_


def use_pieces_of_256_kib(_policy: PolicyRank) -> None:
    checkpoint_layout.PIECE_BYTES = 256 << 10


def added_memory_of_loading(policy: PolicyRank, directory: Path) -> int:
    def load() -> None:
        assert policy.load_checkpoint(directory) is None

    return added_memory(load)


def added_memory_of_writing(policy: PolicyRank, directory: Path) -> int:
    def write() -> None:
        policy.start_checkpoint(directory)
        policy.finish_checkpoint()

    return added_memory(write)


def added_memory(work: Callable[[], None]) -> int:
    """Bytes of this process's peak above its memory before."""

    def status(field: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{field}:")[1].split()[0]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_moments_in_8_bits_are_quantized_again_for_another_number_of_ranks(tmp_path: Path) -> None:
    """One rank, two ranks, one rank: moments stay within half the distance between two codes at each load, 1.4 % or
    less of a block's largest first moment; the weights are bit-identical."""
    config = tiny_config(tmp_path, moments="int8")
    digests, moments = [], []
    for load, ranks in enumerate((1, 2, 1)):
        with policy_processes(ranks, config) as policy:
            if load:
                policy.call("load_checkpoint", tmp_path / f"checkpoint-{load - 1}")
            else:
                policy.call("update", scored_batch(1))
            digests.append(weights_after(policy))
            moments.append(_whole_moments(policy.run(_moments_of_shards)))
            written_checkpoint(policy, tmp_path / f"checkpoint-{load}")
            if load == 2:
                assert weights_after(policy, 2), "the next update runs"
    assert len(set(digests)) == 1
    for again in moments[1:]:
        assert again.keys() == moments[0].keys()
        for name, (first, second) in again.items():
            of_first, of_second = moments[0][name]
            assert float((first - of_first).abs().max()) <= 0.0141 * float(of_first.abs().max()), name
            assert bool(((second > 0) == (of_second > 0)).all()), "no second moment becomes zero"
            assert float((second.sqrt() - of_second.sqrt()).abs().max()) <= 0.0141 * float(of_second.sqrt().max()), name


def _moments_of_shards(policy: PolicyRank) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Both moments of this rank's shards in float32, one-dimensional, by parameter."""
    optimizer = policy._optimizer
    first, second = optimizer.moments.read(optimizer.state.arrays()).values()
    found = {}
    for start, (name, parameter) in zip(optimizer._starts, optimizer.parameters.items(), strict=False):
        of_parameter = slice(start, start + local(parameter).numel())
        found[name] = (first[of_parameter].clone(), second[of_parameter].clone())
    return found


def _whole_moments(
    of_ranks: list[dict[str, tuple[torch.Tensor, torch.Tensor]]],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        name: (torch.cat([each[name][0] for each in of_ranks]), torch.cat([each[name][1] for each in of_ranks]))
        for name in of_ranks[0]
    }


@pytest.mark.parametrize(("written", "wanted"), [("int8", "float32"), ("float32", "bfloat16")])
def test_a_checkpoint_with_moments_of_another_type_is_refused(tmp_path: Path, written: str, wanted: str) -> None:
    model_dir = tiny_model(tmp_path / "model")
    with policy_processes(1, policy_config(model_dir, tmp_path / "run", moments=written)) as policy:
        written_checkpoint(policy, tmp_path / "checkpoint")
    advice = f"found {written}: write policy.optimizer.moments: {written}"
    config = policy_config(model_dir, tmp_path / "run", moments=wanted)
    with policy_processes(1, config) as policy, pytest.raises(BadInput, match=advice):
        policy.call("load_checkpoint", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("ranks", "dtype", "moments"),
    sweep(
        [(1, "float32", "float32"), (2, "bfloat16", "int8")],
        *[(1, "bfloat16", "float32"), (1, "bfloat16", "int8"), (2, "bfloat16", "bfloat16")],
    ),
)
def test_a_checkpoint_is_the_same_wherever_the_state_is(tmp_path: Path, ranks: int, dtype: str, moments: str) -> None:
    """Without a copy, it is written from where the state is, so the next step waits. The plan may change at the same
    time."""
    settings = {"dtype": dtype, "moments": moments, "learning_rate": 1e-2}
    plain = tiny_config(tmp_path, **settings)
    in_place = replace(plain, checkpoint_copy=False)
    streamed, streamed_in_place, partly = (
        replace(config, memory=plain.memory.model_copy(update={"optimizer_offload": share}))
        for config, share in ((plain, 1.0), (in_place, 1.0), (in_place, 0.5))
    )
    ends, starts, directories = set(), set(), []
    for number, config in enumerate((plain, in_place, streamed, streamed_in_place, partly)):
        directories.append(tmp_path / f"checkpoint-{number}")
        with policy_processes(ranks, config) as policy:
            policy.run(write_slowly)
            starts.add(weights_after(policy, 1, 2))
            policy.call("start_checkpoint", directories[-1])
            ends.add(weights_after(policy, 3))
            complete_checkpoint(policy, directories[-1])
    assert len(starts) == len(ends) == 1
    for config, found in ((plain, directories[1:]), (streamed_in_place, directories[:3]), (partly, directories[:1])):
        with policy_processes(ranks, config) as policy:
            for directory in found:
                assert policy.call("load_checkpoint", directory) == [None] * ranks
                assert weights_after(policy) == min(starts)
            # Live, as after a failure that the plan answers.
            policy.call("change_memory", plain.memory)
            assert weights_after(policy, 3) == min(ends)


def write_slowly(_policy: PolicyRank) -> None:
    """In a policy process: the next step is ready to begin long before a checkpoint is written."""
    before_each_piece(lambda: time.sleep(0.01))


def test_memory_of_a_copy_is_given_back_if_a_changed_plan_needs_it(tmp_path: Path) -> None:
    """Once the checkpoint that is being written from it is complete."""
    config = tiny_config(tmp_path, learning_rate=1e-2)
    go_on = tmp_path / "go-on"
    with policy_processes(2, config) as policy:
        policy.run(write_after, go_on)
        at_checkpoint = weights_after(policy, 1)
        policy.run(keep_a_copy)
        policy.call("start_checkpoint", tmp_path / "first")
        policy.call("change_memory", config.memory, True)
        assert policy.run(keeps_a_copy) == [True, True]
        assert policy.call("checkpoint_written") == [False, False]
        threading.Timer(0.5, go_on.touch).start()  # while the change waits
        policy.call("change_memory", config.memory, False)
        assert policy.run(keeps_a_copy) == [False, False]
        assert policy.call("checkpoint_written") == [True, True]
        complete_checkpoint(policy, tmp_path / "first")
        weights_after(policy, 2)
        assert policy.call("load_checkpoint", tmp_path / "first") == [None, None]
        assert weights_after(policy) == at_checkpoint


def write_after(_policy: PolicyRank, go_on: Path) -> None:
    """In a policy process: write nothing before the file `go_on` exists."""

    def wait() -> None:
        while not go_on.exists():
            time.sleep(0.01)

    before_each_piece(wait)


def keep_a_copy(policy: PolicyRank) -> None:
    """Keep the copy as on a GPU, where it is pinned."""
    policy._checkpoint_writer._kept = HostArray(8, torch.uint8, pinned=False, purpose="a test", advice="ignore it")


def keeps_a_copy(policy: PolicyRank) -> bool:
    return policy._checkpoint_writer._kept is not None


def test_a_second_checkpoint_waits_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with policy_processes(1, config) as policy:
        policy.call("start_checkpoint", tmp_path / "first")
        with pytest.raises(RuntimeError, match="still being written"):
            policy.call("start_checkpoint", tmp_path / "second")
        policy.call("finish_checkpoint")
        written_checkpoint(policy, tmp_path / "second")
    adapters = replace(config, lora=LoraSpec(rank=2, alpha=4.0, targets=["q_proj"]))
    with (
        policy_processes(1, adapters) as policy,
        pytest.raises(BadInput, match="belongs to another model or optimizer"),
    ):
        policy.call("load_checkpoint", tmp_path / "second")


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)])
def test_the_exported_model_is_the_policy_to_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    model_dir = tiny_model(tmp_path / "model", kind, tied=tied)
    (model_dir / "tokenizer.json").write_text("{}")
    sampling = '{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 20]}'  # transformers refuses to save it
    (model_dir / "generation_config.json").write_text(sampling)
    config = policy_config(model_dir, tmp_path / "run", learning_rate=1e-2)
    batch = scored_batch(1)
    with policy_processes(2, config) as policy:
        policy.call("update", batch)
        policy.call("export_pretrained", tmp_path / "exported")
        expected = policy.run(token_logprobs, batch)[0]
        trained = policy.run(parameters)[0]
        assert policy.run(_sent_kinds) == [{name: torch.float32 for name in trained}] * 2

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert exported.dtype == torch.float32
    assert {name: tuple(p.shape) for name, p in exported.named_parameters()} == {
        name: array.shape for name, array in trained.items()
    }
    for name, parameter in exported.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), trained[name])
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied
    assert (tmp_path / "exported/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "exported/generation_config.json").read_text() == sampling
    for i, logprobs in enumerate(expected):
        if len(logprobs):
            prompt, response = batch.prompt_ids[i // batch.group_size], batch.response_ids[i]
            logits = exported(input_ids=torch.tensor(np.concatenate([prompt, response]))[None].long()).logits
            found = torch.log_softmax(logits[0, len(prompt) - 1 : -1], -1)
            chosen = found.gather(1, torch.tensor(response).long()[:, None])[:, 0].detach().numpy()
            np.testing.assert_allclose(chosen, logprobs, atol=1e-5)


def _sent_kinds(policy: PolicyRank) -> dict[str, torch.dtype]:
    """Dtype of each weight that the engine gets."""
    with policy.weights_for_sync() as weights:
        return {name: tensor.dtype for name, tensor in weights}


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_a_checkpoint_of_two_copies_is_that_of_one(tmp_path: Path, moments: str) -> None:
    config = tiny_config(tmp_path, moments=moments)
    copied = replace(config, memory=config.memory.model_copy(update={"policy_copies": 2}))
    with policy_processes(4, copied) as policy:
        digest = weights_after(policy, 1, 2)
        directory = written_checkpoint(policy, tmp_path / "checkpoint")
        after = weights_after(policy, 3)
        assert policy.call("load_checkpoint", directory) == [None] * 4
        assert weights_after(policy, 3) == after
    with policy_processes(2, config) as policy:
        assert policy.call("load_checkpoint", directory) == [None] * 2
        assert weights_after(policy) == digest
