"""Time of the probe's work in the steps of another program on a GPU.

    python -m bench.programs.probe_samples [--output DIR]
    python -m bench.programs.probe_samples --smoke

After an optimizer step, the probe reads the allocator's counters (`rljob_probe/step_memory.py`), at most once in a
quarter of a second. The program trains a model of Qwen3-0.6B's shape with plain torch, without code of RLJob, in a
process with the probe, and then times samples in it: a thousand beside an idle GPU and some while it is busy. The cost
of a step follows from them; the difference of two runs would be noise. Records `bench/results/probe_samples.json`.
`--smoke`: a tiny model on the CPU with invented counters; records nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness.needs import require_gpus
from bench.harness.record import RESULTS, record
from bench.programs.probe_overhead import environment

PROGRAM = """
import json, statistics, sys, time
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

device = sys.argv[1]
size = {"cuda": (1024, 28, 16, 151_936), "cpu": (64, 2, 2, 100)}[device]
hidden, layers, heads, vocabulary = size
if device == "cpu":
    torch.cuda.memory_stats = lambda: {"allocated_bytes.all.current": 1, "reserved_bytes.all.current": 2}
config = Qwen3Config(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
                     num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=128, vocab_size=vocabulary)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
batches = torch.randint(0, vocabulary, (4, 8, 512 if device == "cuda" else 8), device=device)

def synchronize():
    if device == "cuda":
        torch.cuda.synchronize()

def step():
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def timed(function):
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun

def timed_step():
    step()
    synchronize()

step_seconds = [timed(timed_step) for _ in range(20)][5:]
calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call" and "rljob_probe" in frame.f_code.co_filename

sys.setprofile(count)
for _ in range(5):
    timed_step()
sys.setprofile(None)

[memory] = [module for name, module in sys.modules.items() if name.endswith("rljob_probe.step_memory")]

def sample():
    memory._taken_at = float("-inf")
    return timed(lambda: memory._sample(torch))

def sample_beside_work():
    with torch.no_grad():
        model(input_ids=batches[0])
    found = sample()
    synchronize()
    return found

idle = [sample() for _ in range(1100)][100:]
busy = [sample_beside_work() for _ in range(50)]
not_due = [timed(lambda: memory._sample(torch)) for _ in range(1000)]
print(json.dumps({
    "step_seconds": statistics.median(step_seconds),
    "sample_seconds": statistics.median(idle),
    "highest_sample_seconds": max(idle + busy),
    "sample_beside_work_seconds": statistics.median(busy),
    "not_due_seconds": statistics.median(not_due),
    "seconds_between_samples": memory.SECONDS_BETWEEN_SAMPLES,
    "probe_calls_in_5_steps": calls,
    "allocated_blocks": torch.cuda.memory_stats().get("active.all.current"),
}))
"""


def main(output: Path, smoke: bool) -> None:
    if not smoke:
        require_gpus(1)
    with tempfile.TemporaryDirectory() as directory:
        row = json.loads(run(environment("with", Path(directory)), "cpu" if smoke else "cuda"))
    row["step_percent"] = step_percent(row)
    print(json.dumps(row, indent=2))
    if not smoke:
        print(record("probe_samples", [row], "a model of Qwen3-0.6B's shape, AdamW, 16,384 tokens a step", output))


def run(variables: dict[str, str], device: str) -> str:
    """The program's output. The probe's directory precedes the present path, which may have torch's packages."""
    variables = variables | {"PYTHONPATH": ":".join([variables["PYTHONPATH"], *filter(None, sys.path)])}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, device], env=variables, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()[-1]


def step_percent(row: dict[str, float]) -> float:
    """The largest share of a step that the probe can take: a sample in each interval, or in each longer step."""
    sample = max(row["sample_seconds"], row["sample_beside_work_seconds"])
    interval = max(row["seconds_between_samples"], row["step_seconds"])
    steps = interval / row["step_seconds"]
    return 100 * (sample + steps * row["not_due_seconds"]) / interval


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; records nothing")
    main(**vars(parser.parse_args()))
