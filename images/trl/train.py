"""GRPO with TRL on a CPU: a tiny model learns to answer in digits. Writes checkpoints and resumes from the latest one.

Some prompts are long: a step with them needs several times the memory of the others.
"""

import os
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

STEPS, GENERATIONS = 8, 8
LONG_PROMPT, LONG_PROMPT_AT_STEP = 250, 5


def characters() -> PreTrainedTokenizerFast:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def digits(completions: list[str], **_: object) -> list[float]:
    """The share of digits in each completion."""
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


set_seed(0)
tokenizer = characters()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=8192,
    pad_token_id=tokenizer.pad_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
prompts = ["A number: " * (LONG_PROMPT if step == LONG_PROMPT_AT_STEP else 1) for step in range(1, STEPS + 1)]
output = Path(os.environ.get("RLJOB_OUTPUT", "output"))
trainer = GRPOTrainer(
    model=LlamaForCausalLM(config),
    processing_class=tokenizer,
    reward_funcs=digits,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    args=GRPOConfig(
        output_dir=str(output),
        max_steps=STEPS,
        save_steps=2,
        per_device_train_batch_size=GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=16,
        gradient_checkpointing=os.environ.get("GRADIENT_CHECKPOINTING", "1") == "1",
        learning_rate=1e-3,
        shuffle_dataset=False,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
