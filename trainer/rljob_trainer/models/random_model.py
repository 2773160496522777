"""`random://qwen3?hidden=64&layers=2&…`: a small architecture with random weights and a character tokenizer.

For tests, demos and benchmarks: it needs no download, and the same query gives the same weights. Written with numpy, so
that resolving a model needs no torch; numpy has no bfloat16, so such files are written by their format: the length of a
header, the header, the values. Initialized as in transformers (normal weights, norms of one). With
`dtype=bfloat16`, models of any size are written in a few hundred MiB of memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rljob_api.model import CHARACTERS, SPECIAL_TOKENS, VOCABULARY_SIZE, RandomModel
from rljob_client.errors import BadInput

# Part of the cache key: increment it if the same query gives other files than before.
_REVISION = 1


def resolve(location: str, cache_directory: Path, accept: Callable[[Path], None] = lambda _directory: None) -> Path:
    """The directory of the model, which is written on first use. `accept`: see `resolve_model`.

    Raises `BadInput` for a wrong query, and if the files cannot be written.
    """
    model = parse_query(location)
    directory = cache_directory / "random" / cache_key(model)
    if not directory.is_dir():
        try:
            _write_atomically(model, directory, accept)
        except OSError as error:
            raise BadInput(
                f"cannot write the model random://{location} to {cache_directory}: {error.strerror or error}; set "
                "XDG_CACHE_HOME to a directory that this user can write to, on a disk with enough space"
            ) from error
    return directory


def cache_key(model: RandomModel) -> str:
    """Name of the cache entry: the architecture, and a digest of everything that determines the files."""
    fields = model.model_dump(exclude={"dtype"} if model.dtype == "float32" else None)
    content = json.dumps({"revision": _REVISION, **fields}, sort_keys=True)
    return f"{model.architecture}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def parse_query(location: str) -> RandomModel:
    """`qwen3?hidden=64&tied=true` → `RandomModel`. Raises `BadInput` with all unknown keys and invalid values."""
    try:
        return RandomModel.of_location(location)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'the query'}: {e['msg']}" for e in error.errors()]
        known = [field.alias for name, field in RandomModel.model_fields.items() if name != "architecture"]
        raise BadInput(
            f"cannot make random://{location}: {'; '.join(problems)}. Expected random://qwen3?… or random://llama?… "
            f"with any of {', '.join(map(str, known))}"
        ) from error


def _write_atomically(model: RandomModel, directory: Path, accept: Callable[[Path], None]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        _write_description(model, partial)
        accept(partial)
        _write_weights(model, partial)
        partial.chmod(0o755)
        partial.rename(directory)
    except OSError:
        # Another process has written the same model in the meantime.
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_description(model: RandomModel, directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(_config(model), indent=2), encoding="utf-8")
    write_character_tokenizer(directory, vocabulary=model.vocabulary, max_positions=model.max_positions)


def _write_weights(model: RandomModel, directory: Path) -> None:
    from safetensors.numpy import save_file

    if model.dtype == "bfloat16":
        write_bfloat16_weights(_weight_shapes(model), model.initializer_range, model.seed, directory)
    else:
        save_file(dict(_weights(model)), directory / "model.safetensors", metadata={"format": "pt"})


def _config(model: RandomModel) -> dict[str, Any]:
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[model.architecture]],
        "model_type": model.architecture,
        "dtype": model.dtype,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tied,
        "use_cache": True,
        **{f"{name}_token_id": SPECIAL_TOKENS.index(f"<{name}>") for name in ("pad", "bos", "eos")},
    }


def _weights(model: RandomModel) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    random = np.random.default_rng(model.seed)
    for name, shape in _weight_shapes(model):
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
        else:
            yield name, random.standard_normal(shape, np.float32) * np.float32(model.initializer_range)


def _weight_shapes(model: RandomModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (model.vocabulary, model.hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (model.hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, model.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, model.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, model.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (model.hidden, queries)
        if model.architecture == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (model.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (model.head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (model.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (model.intermediate_size, model.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (model.intermediate_size, model.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (model.hidden, model.intermediate_size)
    yield "model.norm.weight", (model.hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocabulary, model.hidden)


def write_character_tokenizer(directory: Path, *, vocabulary: int, max_positions: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Every id below `vocabulary` (at least `VOCABULARY_SIZE`) can be decoded, since a random model emits all of them. Ids
    beyond the characters have names that no text is encoded to.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    fillers = [f"<{index}>" for index in range(VOCABULARY_SIZE, vocabulary)]
    tokens = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS, *fillers])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        **{f"{token.strip('<>')}_token": token for token in SPECIAL_TOKENS},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


_DRAWN_NUMBERS = 1 << 24
"""Random numbers that are drawn, since drawing takes most of the time. Larger weights repeat them, each from another
place."""

Shape = tuple[int, ...]


def write_bfloat16_weights(
    shapes: Iterable[tuple[str, Shape]], initializer_range: float, seed: int, directory: Path
) -> None:
    """Write weights by name: matrices with normally distributed numbers, vectors (norms) of ones. Deterministic."""
    random = np.random.default_rng(seed)
    drawn = _bfloat16(random.standard_normal(_DRAWN_NUMBERS, np.float32) * np.float32(initializer_range))
    weight_map: dict[str, str] = {}
    for number, (_, weights) in enumerate(groupby(shapes, key=lambda weight: _layer_of(weight[0]))):
        file, of_layer = f"model-{number:05}.safetensors", dict(weights)
        weight_map |= dict.fromkeys(of_layer, file)
        with (directory / file).open("wb") as stream:
            _write_header(stream, of_layer)
            for shape in of_layer.values():
                _write_values(stream, shape, drawn, int(random.integers(_DRAWN_NUMBERS)))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `model.layers.3`; other names as they are."""
    return ".".join(name.split(".")[:3])


def _write_header(stream: BinaryIO, shapes: Mapping[str, Shape]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    stream.write(len(encoded).to_bytes(8, "little"))
    stream.write(encoded)


def _write_values(stream: BinaryIO, shape: Shape, drawn: npt.NDArray[np.uint16], first: int) -> None:
    if len(shape) == 1:
        stream.write(_bfloat16(np.ones(shape, np.float32)).tobytes())
        return
    left = math.prod(shape)
    while left:
        piece = drawn[first : first + left]
        stream.write(piece.tobytes())
        left, first = left - len(piece), 0


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the numbers, rounded to nearest."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
