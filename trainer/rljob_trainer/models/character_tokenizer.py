"""A tokenizer of one token a character, for models with random weights."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*=?:.,"
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(_CHARACTERS)


def write_character_tokenizer(directory: Path, *, vocabulary: int, max_positions: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Every id below `vocabulary` (at least `VOCABULARY_SIZE`) decodes: a random model emits all of them. Ids beyond the
    characters have names of their own that no text is encoded to.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    fillers = [f"<{index}>" for index in range(VOCABULARY_SIZE, vocabulary)]
    tokens = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *_CHARACTERS, *fillers])}
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
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
