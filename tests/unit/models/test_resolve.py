"""Models are found, downloaded or made, and incomplete ones are refused with the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rljob_client.errors import BadInput
from rljob_trainer.models.checkpoint import is_in_memory, load_tokenizer, policy_weight_shapes
from rljob_trainer.models.resolve import resolve_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint in a directory of its own."""
    return shutil.copytree(resolve_model("random://qwen3?tied=true", tmp_path / "cache"), tmp_path / "model")


def shard(model: Path) -> Path:
    """Split the weights into two files with an index; returns the second file."""
    tensors = load_file(model / "model.safetensors")
    names = list(tensors)
    files = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, model / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model.safetensors").unlink()
    return model / "model-2-of-2.safetensors"


def test_a_directory_is_used_unchanged(model: Path) -> None:
    assert resolve_model(f"file://{model}") == model
    shard(model)
    assert resolve_model(f"file://{model}") == model


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file://model", "expected"),
        ("file:///no/such/model", "expected"),
        (f"file:///{'long' * 99}", "expected"),
        ("s3://bucket/model", "expected"),
        ("model", "expected"),
        ("hf://not/a/name", "hf://org/name"),
        ("oci://name", "oci://registry/name:tag"),
        ("oci://localhost/../../etc:1", "oci://registry/name:tag"),
        ("pvc://models/tiny", r"only in a Kubernetes cluster.* file:///"),
    ],
)
def test_a_uri_that_names_no_model_is_refused(tmp_path: Path, uri: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve_model(uri, tmp_path)


@pytest.mark.parametrize(
    ("name", "written"), [("my model", "my model"), ("my model", "my%20model"), ("a%20b", "a%20b")]
)
def test_a_directory_with_a_space_is_found_in_both_spellings(model: Path, name: str, written: str) -> None:
    model.rename(model.with_name(name))
    assert resolve_model(f"file://{model.with_name(written)}") == model.with_name(name)


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("blob"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "{file}"),
        (lambda file: os.truncate(file, file.stat().st_size * 2 // 3), "cannot read .*{file}"),
        (link_to_nothing, "{file}.*found a symbolic link to .*blob, which is missing; copy"),
        (lambda file: file.write_text(POINTER), "{file}.*fetch the file with git lfs pull"),
    ],
    ids=["missing", "truncated", "link", "pointer"],
)
def test_an_incomplete_file_is_named(model: Path, file: str, damage: Callable[[Path], object], message: str) -> None:
    damage(model / file)
    with pytest.raises(BadInput, match=message.format(file=file)):
        resolve_model(f"file://{model}")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"lm_head.weight": 1}])
def test_an_index_without_names_of_files_is_refused(model: Path, weight_map: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadInput, match=r"expected .*weight_map .*copy the files of the model again"):
        resolve_model(f"file://{model}")


def test_shards_that_differ_from_the_index_are_refused(model: Path) -> None:
    second = shard(model)
    shutil.copy(model / "model-1-of-2.safetensors", second)
    with pytest.raises(BadInput, match="lists weights that its files lack"):
        resolve_model(f"file://{model}")
    second.unlink()
    with pytest.raises(BadInput, match=r"model-2-of-2.safetensors, which .*index.json names, found none"):
        resolve_model(f"file://{model}")


def test_an_image_is_looked_up_in_the_local_cache(model: Path, tmp_path: Path) -> None:
    local = tmp_path / "cache" / "models" / "localhost:5000" / "models" / "tiny" / "1"
    shutil.copytree(model, local)
    assert resolve_model("oci://localhost:5000/models/tiny:1", tmp_path / "cache") == local
    expected = tmp_path / "models" / "localhost" / "models" / "smollm2-135m-instruct" / "latest"
    with pytest.raises(BadInput, match="make model") as raised:
        resolve_model("oci://localhost/models/smollm2-135m-instruct", tmp_path)
    assert str(expected) in str(raised.value)


def test_a_model_mounted_by_kubernetes_is_used_unchanged(model: Path, tmp_path: Path) -> None:
    for uri in ("oci://registry/models/tiny:1", "pvc://models/tiny"):
        assert resolve_model(uri, mounted=model) == model
    with pytest.raises(BadInput, match=r"config\.json"):
        resolve_model("oci://registry/models/tiny:1", mounted=tmp_path)
    assert resolve_model("random://qwen3", tmp_path / "cache", mounted=tmp_path).is_relative_to(tmp_path / "cache")


def test_a_tied_output_layer_is_no_weight_of_its_own(model: Path) -> None:
    names = set(policy_weight_shapes(model))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, model / "model.safetensors")
    assert set(policy_weight_shapes(model)) == names


def test_an_unusable_tokenizer_is_bad_input(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"cannot read the tokenizer"):
        load_tokenizer(model)


def test_models_are_read_without_torch_and_as_utf_8_in_any_locale(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "\u95ee{{ messages[0]['content'] }}"
    (model / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    check = (
        "import sys; from pathlib import Path; from rljob_trainer.models.resolve import resolve_model\n"
        "from rljob_trainer.models.checkpoint import load_tokenizer, model_dimensions, validate_checkpoint\n"
        "model = Path(sys.argv[1]); made = resolve_model('random://qwen3', model / 'cache')\n"
        "validate_checkpoint(model); model_dimensions(made); load_tokenizer(made); sys.exit('torch' in sys.modules)"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", check, model], env=os.environ | locale, check=True)


# --- files in memory ---

MOUNTS = """overlay / overlay rw 0 0
tmpfs /dev tmpfs rw 0 0
shm /dev/shm tmpfs rw,size=1000k 0 0
/dev/sda1 /models ext4 rw 0 0
tmpfs /models/with\\040space tmpfs rw 0 0
tmpfs /covered tmpfs rw 0 0
/dev/sdb1 /covered xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/dev/shm/model", True),
        ("/models/qwen", False),
        ("/models/with space/qwen", True),
        ("/covered/qwen", False),
        ("/home/model", False),
    ],
)
def test_the_file_system_of_the_nearest_mount_counts(directory: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert is_in_memory(Path(directory), tmp_path / "mounts") is expected
    assert not is_in_memory(Path(directory), tmp_path / "missing")
