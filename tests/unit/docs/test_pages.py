"""The pages: links and paths have targets, and what they list is what the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.roles import SupportedSetting
from rljob_client.run_directory.records import LedgerRecord, StepRecord
from rljob_operator.objects.pods import plan_variables
from rljob_trainer.algorithm.micro_batch import rehearsal
from rljob_trainer.algorithms.losses import clipped_ratio
from rljob_trainer.algorithms.objective import policy_loss, with_effective_sample_size
from tests.unit.operator.objects.builders import PLAN

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("[!.]*/README.md")])
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FOLDERS = "bench|charts|crds|docs|examples|images|memory|operator|requirements|scripts|tests|trainer"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./{{}},*-]+)`")
NO_PATH = re.compile(r".*\b[A-Z]{2,}\b|memory/(policy-0|\*)?(\.jsonl)?$")
"""A placeholder, or the folder `memory/` of a run's output directory."""


def text_of(page: Path) -> str:
    return CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Target file and anchor of each relative link; the anchor is empty if the link has none."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    relative = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in relative]


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def alternatives(path: str) -> list[str]:
    """`a/{b,c}/d` as `a/b/d` and `a/c/d`."""
    start, _, rest = path.partition("{")
    options, _, end = rest.partition("}")
    return [f"{start}{option}{end}".rstrip("/") for option in options.split(",")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_to_files_and_headings(page: Path) -> None:
    for file, anchor in links_of(page):
        assert file.exists(), f"{file} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{file.name} has no heading for #{anchor}"
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        if not NO_PATH.match(path):
            for alternative in alternatives(path):
                assert list(ROOT.glob(alternative)), f"{alternative} does not exist"


def test_the_index_links_to_every_page() -> None:
    linked = {file for file, _ in links_of(DOCS / "index.md")}
    assert {page for page in DOCS.glob("*.md") if page.name != "index.md"} <= linked


def test_the_table_of_exit_codes_is_the_enumeration() -> None:
    section = (DOCS / "run.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    documented = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert documented == [
        f"| {code.value} | `{code.name}` | {code.meaning} | {'yes' if code.retry else 'no'} |" for code in ExitCode
    ]


def test_the_page_of_mitigations_has_a_section_for_each_memory_setting() -> None:
    settings = {field.alias for field in MemorySettings.model_fields.values()} - {"mode", "admission"}
    assert settings <= set(re.findall(r"^## (\w+)$", (DOCS / "mitigations.md").read_text(), re.MULTILINE))


def test_the_page_of_other_trainers_names_the_variable_of_each_setting() -> None:
    page = (DOCS / "other-trainers.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| `(RLJOB_PLAN_\w+)` \|", page, re.MULTILINE))
    supported = set(get_args(SupportedSetting))
    assert supported <= {field.alias for field in MemoryPlan.model_fields.values()}
    assert set(documented) == supported - {"expandableSegments"}, "the allocator has a variable of its own"
    for setting, variable in documented.items():
        assert list(plan_variables(PLAN, [setting])) == [variable]
    for share, text in ((0.0, "0"), (0.5, "0.5"), (1.0, "1")):
        plan = PLAN.model_copy(update={"optimizer_offload": share})
        assert plan_variables(plan, ["optimizerOffload"]) == {"RLJOB_PLAN_OPTIMIZER_OFFLOAD": text}


def test_the_page_of_metrics_explains_columns_records_fields_and_metrics() -> None:
    def names_in(heading: str) -> set[str]:
        """Names in the first column of the table below a heading."""
        section = re.split(r"^#+ ", (DOCS / "metrics.md").read_text().split(f"# {heading}\n")[1], flags=re.MULTILINE)[0]
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")][1:]
        return {name for row in rows for name in re.findall(r"[\w.\-]+", row)}

    crd = yaml.safe_load((ROOT / "crds" / "manifests" / "rljobs.rljob.dev.yaml").read_text())
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    assert names_in("`kubectl get rljobs`") == {column["name"].upper() for column in columns}
    assert names_in("`ledger.jsonl`") == {each.model_fields["kind"].default for each in get_args(LedgerRecord)}
    of_every_record = {"kind", "step", "attempt", "committed_at", "memory_counts"}
    fields = {name.partition(".")[0] for name in names_in("Fields of a step")}
    assert set(StepRecord.model_fields) - of_every_record <= fields

    micro_batch = rehearsal(2, packed=False)
    zeros = torch.zeros(len(micro_batch.targets))
    algorithm = AlgorithmSpec(steps=1, kl_coefficient=0.1)
    _, metrics = policy_loss(micro_batch, zeros, zeros, algorithm, clipped_ratio, reference_logprobs=zeros)
    sums = with_effective_sample_size({name: float(value) for name, value in metrics.sums.items()})
    counts = {"tokens", "dropped_tokens", "skipped_tokens", "micro_batches", "skipped_updates", "compilations"}
    of_the_step = {"uniform_groups", "reward_errors", "continued_responses", "continued_tokens"}
    of_the_step |= {"sampling_rounds", "sampled_groups", "dropped_groups", "missing_groups", "overlong_penalty"}
    of_the_step |= {"rewards", "NAME", "streamed_groups"}  # rewards/NAME
    of_the_step |= {"masked_responses", "asleep_engine_bytes", "empty_responses", "grad_norm", "learning_rate"}
    of_the_step |= {"rewards", "NAME"}  # of each reward function
    assert names_in("`metrics` of a step") == {*sums, *metrics.maxima} | counts | of_the_step
