"""Effect of rounding to 8 bits on the log-probabilities of a model, on a CPU: an estimate for 8-bit rollouts.

    python -m bench.programs.rounding_to_8_bits

Compares a model in float32 with itself in bfloat16, and with itself in float32 where the weights and inputs of all
linear layers but the output layer are rounded to float8_e4m3fn, with one scale for each tensor as in
`rollout.quantization: Fp8PerTensor`. The tokens are drawn from the float32 model.

Two models: SmolLM2-135M-Instruct (`make model`) on text that it generates, and 36 layers of Qwen3-8B's shape with
random weights. All of its layers share the weights of one, and its vocabulary has 32,768 tokens, so that it fits into
12 GiB of memory.

Records `bench/results/rounding_to_8_bits.json`. Takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench.harness.record import RESULTS, record
from rljob_trainer.models.resolve import resolve_model

SMOLLM2 = "oci://localhost/models/smollm2-135m-instruct:1"
PROMPT = "Explain why the sky is blue."
LAYERS, VOCABULARY, TOKENS = 36, 32_768, 96


class RoundedLinear(torch.nn.Module):
    """A linear layer whose weight and input are rounded."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(layer.weight.detach()), layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(inputs), self.weight, self.bias)


def main(output: Path) -> None:
    torch.manual_seed(0)
    rows = [row("SmolLM2-135M-Instruct", *smollm2()), row("Qwen3-8B's shape, random weights", *qwen3_8b())]
    note = "Mean absolute differences from float32, in nats, of tokens that the float32 model draws"
    for each in rows:
        print(each)
    print(record("rounding_to_8_bits", rows, note, output))


@torch.no_grad()
def row(name: str, model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """`tokens`: the input, sequences × length. Changes the model."""
    exact = log_probabilities(model, tokens)
    drawn = torch.multinomial(exact.exp().flatten(0, 1), 1).view(*tokens.shape, 1)
    exact = exact.gather(-1, drawn)
    of_bfloat16 = log_probabilities(model.bfloat16(), tokens).gather(-1, drawn)
    # The weights are those of bfloat16 from here on, as in an engine.
    round_linear_layers(model.float())
    of_8_bits = log_probabilities(model, tokens).gather(-1, drawn)
    return {
        "model": name,
        "tokens": drawn.numel(),
        "bfloat16": (exact - of_bfloat16).abs().mean().item(),
        "8 bits": (exact - of_8_bits).abs().mean().item(),
        "8 bits, largest": (exact - of_8_bits).abs().max().item(),
    }


def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token of the vocabulary after each position: sequences × length × vocabulary, in float32."""
    return torch.log_softmax(model(tokens, use_cache=False).logits.float(), dim=-1)


def round_linear_layers(module: torch.nn.Module) -> None:
    """Replace all linear layers but the output layer."""
    for name, child in list(module.named_children()):
        if isinstance(child, torch.nn.Linear) and name != "lm_head":
            setattr(module, name, RoundedLinear(child))
        else:
            round_linear_layers(child)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Rounded to 8 bits, with a scale that maps the largest absolute value to the largest of float8_e4m3fn."""
    scale = values.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def smollm2() -> tuple[Any, torch.Tensor]:
    """The model in float32, and 16 sequences of a prompt and 48 generated tokens."""
    folder = resolve_model(SMOLLM2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt").input_ids.repeat(16, 1)
    return model, model.generate(prompt, do_sample=True, top_k=0, min_new_tokens=48, max_new_tokens=48, pad_token_id=0)


def qwen3_8b() -> tuple[Any, torch.Tensor]:
    """The model in float32, and one sequence of random tokens."""
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    # Only one layer is created, because all of them would take 27 GB.
    config.num_hidden_layers = 1
    model = Qwen3ForCausalLM(config).eval()
    config.num_hidden_layers = LAYERS
    model.model.layers = torch.nn.ModuleList([model.model.layers[0]] * LAYERS)
    return model, torch.randint(VOCABULARY, (1, TOKENS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    main(**vars(parser.parse_args()))
