from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.models.random_model import write_character_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<bos>' + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per character, no chat template."""
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(directory, vocabulary=64, max_positions=256)
    return load_tokenizer(directory)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Any:
    write_character_tokenizer(tmp_path, vocabulary=64, max_positions=256)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
