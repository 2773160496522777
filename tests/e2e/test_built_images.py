"""The images as they are built: who runs in them, what is in them and what is not, and that they work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_testing.patience import RUN_PATIENCE_SECONDS
from tests.e2e.image_container import ImageContainer, build_images, buildah, image_container, missing

REPOSITORY = Path(__file__).parents[2]
VERSION = "0.1.0"
OPERATOR = f"localhost/rljob/operator:{VERSION}"
TRAINER = f"localhost/rljob/trainer:{VERSION}-cpu"
MEGABYTE = 1_000_000
# Beside what images/trainer/not-on-cpu.txt names: for pictures and sound, and for Intel's GPUs.
NOT_IN_THE_LOCK = {"torchaudio", "torchcodec", "torchvision", "intel-cmplr-lib-ur"}

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"images: {missing()}")


@pytest.fixture(scope="session")
def built_images() -> None:
    """Both images are up to date; minutes where nothing is cached."""
    build_images("operator", "trainer")


@pytest.fixture(scope="session")
def operator(built_images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageContainer]:
    with image_container(OPERATOR, tmp_path_factory.mktemp("operator")) as container:
        yield container


@pytest.fixture(scope="session")
def trainer(built_images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageContainer]:
    with image_container(TRAINER, tmp_path_factory.mktemp("trainer")) as container:
        yield container


@pytest.fixture(params=["operator", "trainer"])
def either(request: pytest.FixtureRequest) -> ImageContainer:
    container = request.getfixturevalue(request.param)
    assert isinstance(container, ImageContainer)
    return container


def python(container: ImageContainer, code: str) -> str:
    done = container.run(["python", "-c", code], environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def size(reference: str) -> int:
    """Bytes of all layers, unpacked."""
    manifest = json.loads(json.loads(buildah("inspect", "--type", "image", reference))["Manifest"])
    return sum(int(layer["size"]) for layer in manifest["layers"])


class TestBoth:
    def test_processes_run_as_uid_10001_and_write_only_their_home(self, either: ImageContainer) -> None:
        done = either.run(["sh", "-c", "id -u; id -g; id -un; echo $HOME; touch /tmp/a $HOME/a; touch /opt/a || true"])
        assert done.stdout.split() == ["10001", "10001", "rljob", "/home/rljob"]
        assert "Read-only file system" in done.stderr

    def test_the_bill_of_materials_lists_the_packages_and_the_base_has_a_digest(self, either: ImageContainer) -> None:
        bill = json.loads((either.rootfs / "opt/rljob/sbom.cdx.json").read_text())
        listed = {component["name"].lower() for component in bill["components"]}
        names = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
        assert {name for name in python(either, names).split() if not name.startswith("rljob")} <= listed
        labels = either.config["Labels"]
        assert labels["org.opencontainers.image.version"] == VERSION
        assert labels["org.opencontainers.image.base.digest"].startswith("sha256:")

    def test_no_installer_is_in_the_image(self, either: ImageContainer) -> None:
        assert python(either, "import importlib.util as u; print([n for n in ('pip', 'uv') if u.find_spec(n)])") == "[]"
        assert not any(path.name == "uv" for path in (either.rootfs / "tmp").iterdir())

    def test_no_address_of_a_package_index_is_in_labels_history_or_settings(self, either: ImageContainer) -> None:
        steps = [step.get("created_by", "") for step in either.history]
        labels = {name: value for name, value in either.config["Labels"].items() if not name.endswith(".source")}
        assert "://" not in json.dumps([steps, labels, either.config["Env"]])
        for settings in ("etc/pip.conf", "etc/uv/uv.toml"):
            path = either.rootfs / settings
            assert not path.exists() or path.read_text() == ""

    def test_modules_come_with_their_bytecode(self, either: ImageContainer) -> None:
        """A pod cannot write any, and would compile everything it imports at each start."""
        code = "import pydantic, rljob_api; print([m.__spec__.cached for m in (pydantic, rljob_api)])"
        for cached in json.loads(python(either, code).replace("'", '"')):
            assert (either.rootfs / cached.lstrip("/")).is_file()


class TestOperator:
    def test_it_is_small_and_carries_no_torch(self, operator: ImageContainer) -> None:
        assert size(OPERATOR) < 200 * MEGABYTE
        heavy = ("torch", "vllm", "ray", "transformers", "numpy", "rljob_trainer")
        assert python(operator, f"import importlib.util as u; print([n for n in {heavy} if u.find_spec(n)])") == "[]"

    def test_its_program_starts(self, operator: ImageContainer) -> None:
        done = operator.run([*operator.config["Entrypoint"], "--help"])
        assert done.returncode == 0, done.stderr
        assert "rljob-operator" in done.stdout

    def test_it_can_make_the_certificate_of_its_metrics(self, operator: ImageContainer) -> None:
        code = "from rljob_operator.runtime.endpoints import Certificate; Certificate(None); print('made')"
        assert python(operator, code) == "made"


class TestTrainer:
    def test_it_is_half_of_what_it_would_be_with_nvidias_libraries(self, trainer: ImageContainer) -> None:
        assert size(TRAINER) < 3600 * MEGABYTE
        assert not list(trainer.rootfs.glob("usr/bin/*gcc*"))

    def test_every_requirement_is_there_except_those_of_gpus(self, trainer: ImageContainer) -> None:
        left_out = (REPOSITORY / "images/trainer/not-on-cpu.txt").read_text().splitlines()
        code = """
from importlib.metadata import distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as name
installed = {name(d.metadata["Name"]) for d in distributions()}
required = {Requirement(r) for d in distributions() for r in d.requires or ()}
print(*sorted({name(r.name) for r in required if not r.marker or r.marker.evaluate({"extra": ""})} - installed))
"""
        missing_requirements = set(python(trainer, code).split())
        allowed = {line for line in left_out if not line.startswith("#")} | NOT_IN_THE_LOCK
        assert missing_requirements <= allowed

    def test_its_label_tells_the_torch_version(self, trainer: ImageContainer) -> None:
        installed = python(trainer, "import torch; print(torch.__version__.partition('+')[0])")
        assert trainer.config["Labels"]["dev.rljob.torch-version"] == installed

    def test_asking_for_a_gpu_raises_as_it_does_with_nvidias_libraries(self, trainer: ImageContainer) -> None:
        code = """
import torch
print(torch.cuda.is_available(), torch.cuda.device_count())
try:
    torch.zeros(1).cuda()
except RuntimeError as error:
    print("no NVIDIA driver" in str(error))
"""
        assert python(trainer, code).split() == ["False", "0", "True"]

    def test_a_job_trains_to_its_end(self, trainer: ImageContainer, tmp_path: Path) -> None:
        output = tmp_path / "output"
        output.mkdir()
        os.chown(output, 10001, 10001)
        done = trainer.run(
            ["rljob", "run", "/job/digits.yaml", "--output", "/var/lib/rljob"],
            volumes={output: "/var/lib/rljob", REPOSITORY / "examples": "/job"},
            timeout=RUN_PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-2000:]
        summary = json.loads((output / "summary.json").read_text())
        assert summary["status"] == "Complete"
        assert summary["last_reward"] > 0.9
