"""The model's class in vLLM's registry, before vLLM asks for it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


def register_model_class(model_dir: Path) -> None:
    """Have vLLM find the class of the model in `model_dir` imported.

    It would look at it in a process of its own, lest CUDA be initialized in one that forks: that process imports vLLM
    once more, and in a new pod there is no cache of what an earlier one found. Here the engine runs in the process that
    imports it. A class that cannot be imported is left to vLLM, which says so in its own words.
    """
    from vllm import ModelRegistry

    for architecture in json.loads((model_dir / "config.json").read_text()).get("architectures") or []:
        if model := ModelRegistry.models.get(architecture):
            with suppress(Exception):
                ModelRegistry.register_model(architecture, model.load_model_cls())
