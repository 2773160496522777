"""The chart's package: metadata, README, notes and examples, which have to stand alone."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.manifest import load_manifest
from tests.unit.chart.conftest import CHART, Helm, Object, Render, environment, operator_container
from tests.unit.chart.test_chart_values import SCHEMA_VALUES

REPOSITORY = CHART.parents[1]
METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text())
README = (CHART / "README.md").read_text()
OUTSIDE = re.compile(r"(?<![\w.-])(?:docs|examples|crds|operator|charts|tests|images)/[\w./-]+\.(?:md|yaml|py)|\.\./")
"""Files that the repository has, and the package does not."""


@pytest.fixture(scope="session")
def package(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the chart, unpacked."""
    folder = tmp_path_factory.mktemp("package")
    result = helm("package", str(CHART), "--destination", str(folder))
    assert result.returncode == 0, result.stderr
    [archive] = folder.glob("*.tgz")
    assert archive.name == "rljob-operator-0.1.0.tgz", "the name in the README"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / "rljob-operator"


def test_the_package_has_all_files_of_the_chart_and_no_other(package: Path) -> None:
    expected = {path.relative_to(CHART) for path in CHART.rglob("*") if path.is_file()} - {Path(".helmignore")}
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert found - {Path(".helmignore")} == expected


def test_the_package_alone_renders_the_same_objects(package: Path, helm: Helm) -> None:
    values = ("--namespace", "rljob-system", "--set", "admissionWebhook.tls.secretName=own")  # else a new certificate
    results = [helm("template", "rljob", str(chart), *values) for chart in (package, CHART, CHART)]
    assert {result.returncode for result in results} == {0}
    assert len({result.stdout for result in results}) == 1, "two renderings are identical"


@pytest.mark.parametrize("file", ["README.md", "Chart.yaml", "templates/NOTES.txt"])
def test_texts_for_users_refer_to_no_file_outside_of_the_package(file: str) -> None:
    assert OUTSIDE.findall((CHART / file).read_text()) == []
    links = re.findall(r"\]\(([^)]*)\)", (CHART / file).read_text())
    assert all(link.startswith("#") for link in links)


def test_links_of_the_readme_lead_to_its_sections() -> None:
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}
    assert set(re.findall(r"\]\(#([^)]*)\)", README)) <= anchors


def test_the_readme_names_existing_values_and_their_defaults() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    table = README.partition("| value | default |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines()[2:]]
    assert len(rows) > 15
    for names, default, _ in rows:
        paths = re.findall(r"`([\w.]+)`", names)
        assert set(paths) <= SCHEMA_VALUES.keys()
        if shown := re.fullmatch(r"`(.*)`", default):
            assert yaml.safe_load(shown[1]) == value_of(defaults, paths[0])
    mentioned = set(re.findall(r"`((?:\w+\.)+\w+)(?:=[^`]*)?`", README)) - {
        "ca.crt",
        "tls.crt",
        "tls.key",
        "rljob.spec",
    }
    assert {name for name in mentioned if name.partition(".")[0] in defaults} <= SCHEMA_VALUES.keys()


def value_of(values: dict[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found[name]
    return found


def test_values_in_the_readme_are_accepted(helm: Helm, tmp_path: Path) -> None:
    [values] = [block for block in blocks(README, "yaml") if "networkPolicy:" in block]
    file = tmp_path / "values.yaml"
    file.write_text(values)
    result = helm("template", "rljob", str(CHART), "--values", str(file))
    assert result.returncode == 0, result.stderr


def test_the_readme_has_the_example_job() -> None:
    [job] = [yaml.safe_load(block) for block in blocks(README, "yaml") if "kind: RLJob" in block]
    assert job == yaml.safe_load((REPOSITORY / "examples" / "digits.yaml").read_text())


@pytest.mark.parametrize(("device", "name"), [("gpu", "digits"), ("cpu", "digits-cpu")])
def test_the_notes_have_a_job_that_can_be_pasted(helm: Helm, tmp_path: Path, device: str, name: str) -> None:
    text = notes(helm, f"trainer.device={device}", "namespaces={team-a}")
    [manifest] = re.findall(r"^kubectl apply -n team-a -f - <<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL)
    file = tmp_path / "job.yaml"
    file.write_text(manifest)
    assert load_manifest(file).metadata.name == name
    assert f"kubectl describe rljob -n team-a {name}" in text


def test_the_notes_name_who_reaches_the_metrics_by_default(helm: Helm) -> None:
    warning = "Only pods of the namespace rljob-system reach the metrics."
    assert warning in notes(helm)
    assert warning not in notes(helm, "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.a=b")
    assert warning not in notes(helm, "networkPolicy.enabled=false")


def notes(helm: Helm, *assignments: str) -> str:
    settings = [argument for assignment in assignments for argument in ("--set", assignment)]
    command = ("install", "rljob", str(CHART), "--namespace", "rljob-system", "--dry-run=client", *settings)
    result = helm(*command)
    assert result.returncode == 0, result.stderr
    return result.stdout.partition("\nNOTES:\n")[2]


def blocks(markdown: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)


def test_images_of_the_metadata_are_those_that_the_chart_uses(render: Render) -> None:
    objects = render()
    listed = {one["name"]: one["image"] for one in annotation("images")}
    assert listed["operator"] == operator_container(objects)["image"]
    assert listed["trainer"] == environment(objects)["RLJOB_OPERATOR_TRAINER_IMAGE"]


def test_crds_of_the_metadata_are_those_of_the_chart() -> None:
    files = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "files" / "crds").glob("*.yaml"))]
    assert [one["name"] for one in annotation("crds")] == [crd["metadata"]["name"] for crd in files]


def test_changes_of_the_metadata_have_a_known_kind() -> None:
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert all(change.keys() == {"kind", "description"} and change["kind"] in kinds for change in annotation("changes"))


def annotation(name: str) -> list[Object]:
    found: list[Object] = yaml.safe_load(METADATA["annotations"][f"artifacthub.io/{name}"])
    return found
