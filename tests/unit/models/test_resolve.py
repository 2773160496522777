from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.models.checkpoint import load_tokenizer, policy_weight_shapes, require_same_rope
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.models.trainable import require_trainable


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint in a directory of its own."""
    return shutil.copytree(resolve_model("random://qwen3?tied=true", tmp_path / "cache"), tmp_path / "model")


def shard(model: Path) -> Path:
    """Split the weights into two files with an index; returns the second file."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    names = list(tensors)
    files = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, model / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model.safetensors").unlink()
    return model / "model-2-of-2.safetensors"


class TestFile:
    def test_a_directory_is_used_unchanged(self, model: Path) -> None:
        assert resolve_model(f"file://{model}") == model
        shard(model)
        assert resolve_model(f"file://{model}") == model

    @pytest.mark.parametrize(
        "uri", ["file://model", "file:///no/such/model", f"file:///{'long' * 99}", "s3://bucket/model", "model"]
    )
    def test_a_uri_that_names_no_directory_is_refused(self, uri: str) -> None:
        with pytest.raises(BadInput, match="expected"):
            resolve_model(uri)

    @pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
    def test_a_missing_file_is_named(self, model: Path, file: str) -> None:
        (model / file).unlink()
        with pytest.raises(BadInput, match=file):
            resolve_model(f"file://{model}")

    @pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
    def test_a_truncated_file_is_named(self, model: Path, file: str) -> None:
        content = (model / file).read_bytes()
        (model / file).write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(BadInput, match=f"cannot read .*{file}"):
            resolve_model(f"file://{model}")

    @pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_link_to_a_missing_file_is_named_as_such(self, model: Path, file: str) -> None:
        (model / file).unlink()
        (model / file).symlink_to(model / "blob")
        with pytest.raises(BadInput, match=f"{file}.*found a symbolic link to .*blob, which is missing; copy"):
            resolve_model(f"file://{model}")

    @pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_pointer_of_git_lfs_is_named_as_such(self, model: Path, file: str) -> None:
        (model / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        with pytest.raises(BadInput, match=f"{file}.*fetch the file with git lfs pull"):
            resolve_model(f"file://{model}")

    @pytest.mark.parametrize("weight_map", [None, [], {}, {"lm_head.weight": 1}])
    def test_an_index_without_names_of_files_is_refused(self, model: Path, weight_map: object) -> None:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BadInput, match=r"expected .*weight_map .*copy the files of the model again"):
            resolve_model(f"file://{model}")

    def test_a_missing_shard_is_named(self, model: Path) -> None:
        shard(model).unlink()
        with pytest.raises(BadInput, match=r"model-2-of-2.safetensors, which .*index.json names, found none"):
            resolve_model(f"file://{model}")

    def test_a_shard_without_the_weights_that_the_index_lists_is_refused(self, model: Path) -> None:
        second = shard(model)
        shutil.copy(model / "model-1-of-2.safetensors", second)
        with pytest.raises(BadInput, match="lists weights that its files lack"):
            resolve_model(f"file://{model}")


class TestImage:
    def test_an_image_is_looked_up_in_the_local_cache(self, model: Path, tmp_path: Path) -> None:
        local = tmp_path / "cache" / "models" / "localhost:5000" / "models" / "tiny" / "1"
        shutil.copytree(model, local)
        assert resolve_model("oci://localhost:5000/models/tiny:1", tmp_path / "cache") == local

    def test_a_missing_image_is_refused_with_its_path_and_a_command(self, tmp_path: Path) -> None:
        expected = tmp_path / "models" / "localhost" / "models" / "smollm2-135m-instruct" / "latest"
        with pytest.raises(BadInput, match="make model") as raised:
            resolve_model("oci://localhost/models/smollm2-135m-instruct", tmp_path)
        assert str(expected) in str(raised.value)

    @pytest.mark.parametrize("uri", ["oci://name", "oci://localhost/../../etc:1"])
    def test_text_that_is_not_an_image_is_refused(self, tmp_path: Path, uri: str) -> None:
        with pytest.raises(BadInput, match="oci://registry/name:tag"):
            resolve_model(uri, tmp_path)


class TestInAPod:
    @pytest.mark.parametrize("uri", ["oci://registry/models/tiny:1", "pvc://models/tiny"])
    def test_a_model_mounted_by_kubernetes_is_used_unchanged(self, model: Path, uri: str) -> None:
        assert resolve_model(uri, mounted=model) == model

    def test_a_volume_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"config\.json"):
            resolve_model("oci://registry/models/tiny:1", mounted=tmp_path)

    def test_other_models_are_not_looked_for_in_the_volume(self, model: Path, tmp_path: Path) -> None:
        assert resolve_model("random://qwen3", tmp_path / "cache", mounted=tmp_path).is_relative_to(tmp_path / "cache")


class TestHub:
    def test_a_model_comes_from_the_hubs_cache_without_a_network(self, model: Path, tmp_path: Path) -> None:
        """Uses the cache layout of huggingface_hub, read by its own code in a separate process."""
        commit = "0123456789abcdef0123456789abcdef01234567"
        repository = tmp_path / "hub" / "hub" / "models--org--tiny"
        shutil.copytree(model, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)

        assert self.resolve("hf://org/tiny", tmp_path / "hub") == str(repository / "snapshots" / commit)
        assert "not in the local cache" in self.resolve("hf://org/other", tmp_path / "hub")
        assert "hf://org/name" in self.resolve("hf://not/a/name", tmp_path / "hub")

    @staticmethod
    def resolve(uri: str, hf_home: Path) -> str:
        script = (
            "import sys\n"
            "from rljob_client.errors import RunError\n"
            "from rljob_trainer.models.resolve import resolve_model\n"
            "try: print(resolve_model(sys.argv[1]))\n"
            "except RunError as error: print(error)\n"
        )
        environment = {**os.environ, "HF_HOME": str(hf_home), "HF_HUB_OFFLINE": "1"}
        environment.pop("HF_HUB_CACHE", None)
        finished = subprocess.run(
            [sys.executable, "-c", script, uri], env=environment, capture_output=True, text=True, check=True
        )
        return finished.stdout.strip()


def test_a_volume_claim_is_refused_outside_kubernetes() -> None:
    with pytest.raises(BadInput, match=r"only in a Kubernetes cluster.* file:///"):
        resolve_model("pvc://models/tiny")


def test_a_tied_output_layer_is_no_weight_of_its_own(model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    names = set(policy_weight_shapes(model))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, model / "model.safetensors")
    assert set(policy_weight_shapes(model)) == names


def test_an_unusable_tokenizer_is_bad_input(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"cannot read the tokenizer"):
        load_tokenizer(model)


def test_models_are_resolved_without_torch(tmp_path: Path) -> None:
    check = (
        "import sys; from pathlib import Path; from rljob_trainer.models.resolve import resolve_model\n"
        "from rljob_trainer.models.checkpoint import model_dimensions; from rljob_trainer.models.checkpoint import *\n"
        "directory = resolve_model('random://qwen3', Path(sys.argv[1])); model_dimensions(directory)\n"
        "load_tokenizer(directory); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check, str(tmp_path)], check=True)


class TestKinds:
    def test_a_dense_model_is_trainable(self, model: Path) -> None:
        require_trainable(model)

    @pytest.mark.parametrize("setting", ["lm_head_multiplier", "final_logit_softcapping", "logits_scaling"])
    def test_a_scaled_or_capped_head_is_refused(self, model: Path, setting: str) -> None:
        config = json.loads((model / "config.json").read_text())
        for value, refused in ((1.0, False), (None, False), (0.25, True)):
            (model / "config.json").write_text(json.dumps(config | {setting: value}))
            if refused:
                with pytest.raises(BadInput, match=rf"neither scaled nor capped .*{setting}: 0\.25"):
                    require_trainable(model)
            else:
                require_trainable(model)

    def test_a_mixture_of_experts_is_refused(self, model: Path) -> None:
        from safetensors.numpy import load_file, save_file

        tensors = load_file(model / "model.safetensors")
        weight = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = weight
        save_file(tensors, model / "model.safetensors")
        with pytest.raises(BadInput, match=r"expected a dense model .*mlp\.experts\.0"):
            require_trainable(model)


@pytest.mark.parametrize(
    ("settings", "longest", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8, "of the type dynamic"),
        (
            {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 64},
            65,
            r"\(64\).*found 65",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 64}, 64, None),
        ({"rope_scaling": {"type": "su"}}, 8, "not set"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1000, None),
        ({}, 1000, None),
    ],
)
def test_rope_that_policy_and_engine_compute_differently_is_refused(
    model: Path, settings: dict[str, object], longest: int, message: str | None
) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config | settings))
    if message is None:
        require_same_rope(model, longest)
    else:
        with pytest.raises(BadInput, match=message):
            require_same_rope(model, longest)


@pytest.mark.parametrize(
    ("name", "written"), [("my model", "my model"), ("my model", "my%20model"), ("a%20b", "a%20b")]
)
def test_a_directory_with_a_space_is_found_in_both_spellings(model: Path, name: str, written: str) -> None:
    model.rename(model.with_name(name))
    assert resolve_model(f"file://{model.with_name(written)}") == model.with_name(name)


def test_settings_are_read_as_utf_8_in_any_locale(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "\u95ee{{ messages[0]['content'] }}"
    (model / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    code = (
        "import sys, pathlib; from rljob_trainer.models.checkpoint import validate_checkpoint; "
        "validate_checkpoint(pathlib.Path(sys.argv[1]))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, model], env=os.environ | locale, check=True)
