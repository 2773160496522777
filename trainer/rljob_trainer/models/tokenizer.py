"""The tokenizer of a model, without torch: the controller needs no more of the model than this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_trainer.errors import BadInput


def load_tokenizer(model_directory: Path) -> Any:
    """The model's fast tokenizer (`transformers.PreTrainedTokenizerFast`), with its chat template where it has one.

    `AutoTokenizer` would import torch and every model class's registry: 8 seconds more.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise BadInput(f"cannot read the tokenizer in {model_directory}: {error}") from error
