"""The sets of failures adapted from public threads (tests/data/public): those that are right stay right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_memory.diagnosis import Diagnosis, diagnose
from rljob_memory.evidence import read_evidence

SETS = Path(__file__).parents[3] / "data" / "public"
ACCEPTED_MISSES = {
    "third": {
        # A table of nvidia-smi, and no failure: it shows memory in use without a process, as it does in any container.
        "34-crosse-smi-no-process.txt",
        # What stays in use after the engine's sleeps grows twice: so it does if weights and optimizer arrive beside it.
        "103-nemorl-sleep-residue.txt",
    },
    "fourth": set(),
    "fifth": {
        # Torch's numbers of two ranks do not add up: the failing process, which runs its engine, has 0 bytes in use.
        "29-swift-rlhf-gemma3-27b.txt",
    },
    "sixth": set(),
    "seventh": {
        # A buffer of a TPU, which only the name of the call above it explains: the prompt of a session.
        "10-diffusers-keras-gemma-preset.txt",
        # 1.7 GiB of a GPU of 7.8 GiB are not this process's, by its own numbers: perhaps a desktop's.
        "23-vllm-v1-8gb-1gib.txt",
        # A report that a person's own program prints.
        "24-verl-kv-wake-driver-view.txt",
    },
    "eighth": {
        # A traceback without its message, above a table of the step before.
        "02-criteo-fourth-update-step.txt",
        # The end of a message, without the request.
        "08-hrm-0-bytes-of-191.txt",
        # A list of a person's own: the title says what grows.
        "13-trinity-reserved-grows.txt",
        # The log-probabilities of a prompt: an engine's cache is no smaller reason.
        "22-vllm-prompt-logprobs.txt",
        # Frames that a terminal has broken behind "File".
        "25-fairseq2-mt-optimizer-step.txt",
        # Only the missing files show that a checkpoint was being saved.
        "59-textgen-save-every-n-steps.txt",
        # A slice of a GPU in the output of `nvidia-smi -L`.
        "81-nim-embedding-mig-3g.txt",
    },
    "ninth": set(),
    "tenth": {
        # An engine that its weights and a cache of 4 % fill on a GPU that shares the host's memory.
        "36-moe-on-apu.txt",
    },
    "eleventh": {
        # Only a wrapper of torch's functions, and a GPU full of tensors.
        "03-torchtune-convert.txt",
        # The name of the model, its dtype and the size of the GPU: nothing says that it was being loaded.
        "12-verl-single-card-init.txt",
        # An engine that cannot map its memory again: as a rule, the trainer's cache is in its way.
        "13-verl-wake-up.txt",
        # The same, where the engine itself had not freed all of it.
        "15-miles-train-wakeup.txt",
        # An error that a manual quotes.
        "39-cluster-manual-page.txt",
    },
    "twelfth": set(),
}


class Measured:
    """The cases of one set and their diagnoses."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = SETS / name
        cases = json.loads((folder / "cases.json").read_text())
        self.accepted: dict[str, list[str]] = {case["file"]: case["expected"] for case in cases}
        self.found: dict[str, Diagnosis | None] = {
            file: next(iter(diagnose(read_evidence(folder / file))), None) for file in self.accepted
        }
        self.misses = {file for file in self.accepted if not self._is_right(file)}

    def _is_right(self, file: str) -> bool:
        """True if the class is accepted; a case without a failure must have no diagnosis."""
        best, accepted = self.found[file], self.accepted[file]
        return str(best.failure_class) in accepted if best else not accepted


@pytest.fixture(scope="module", params=sorted(ACCEPTED_MISSES))
def measured(request: pytest.FixtureRequest) -> Measured:
    return Measured(request.param)


def test_the_misses_of_a_set_are_the_accepted_ones(measured: Measured) -> None:
    assert measured.misses == ACCEPTED_MISSES[measured.name]


def test_no_case_of_a_set_is_wrong_and_sure(measured: Measured) -> None:
    assert {file for file in measured.misses if (best := measured.found[file]) and best.confidence > 0.8} == set()


def test_no_other_case_without_a_failure_is_diagnosed(measured: Measured) -> None:
    diagnosed = {file for file, accepted in measured.accepted.items() if not accepted and measured.found[file]}
    assert diagnosed <= ACCEPTED_MISSES[measured.name]
