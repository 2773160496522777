"""A library loads with placeholders for its dependencies; a call into one fails with its name."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "images" / "trainer" / "cuda_placeholders.py"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@pytest.fixture(scope="module")
def placeholders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_placeholders", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A library with a versioned and a plain symbol from a library that is removed afterwards."""
    (tmp_path / "vendor.c").write_text("int vendorAdd(int a) { return a; }\nint plainAdd(int a) { return a; }\n")
    (tmp_path / "vendor.map").write_text("libvendor.so.9 { vendorAdd; };\n")
    (tmp_path / "user.c").write_text(
        "#include <stdlib.h>\nint vendorAdd(int); int plainAdd(int); long PyLong_AsLong(void *);\n"
        'int harmless(void) { return atoi("42"); }\nint harmful(void) { return vendorAdd(1); }\n'
        "int plain(void) { return plainAdd(1); }\nint python(void) { return PyLong_AsLong(0); }\n"
    )
    for command in (
        "gcc -shared -fPIC vendor.c -o libvendor.so.9 -Wl,-soname=libvendor.so.9,--version-script=vendor.map",
        "gcc -shared -fPIC user.c -o libuser.so ./libvendor.so.9 -Wl,-rpath,$ORIGIN",
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    (tmp_path / "libvendor.so.9").unlink()
    return tmp_path / "libuser.so"


def call(library: Path, function: str) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; print(ctypes.PyDLL({str(library)!r}, ctypes.RTLD_GLOBAL).{function}())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"LD_BIND_NOW": "1"}
    )


def test_the_loader_report_names_missing_symbols_except_pythons(placeholders: ModuleType, user: Path) -> None:
    unresolved = placeholders.read_loader_report(placeholders.loader_report(user))
    assert unresolved.libraries == ("libvendor.so.9",)
    assert set(unresolved.functions) == {("vendorAdd", "libvendor.so.9"), ("plainAdd", "")}


def test_with_placeholders_the_library_loads_and_a_call_into_one_names_it(placeholders: ModuleType, user: Path) -> None:
    assert call(user, "harmless").returncode != 0
    unresolved = placeholders.read_loader_report(placeholders.loader_report(user))
    placeholders.compile_library(unresolved.functions, user.with_name("libvendor.so.9"))
    assert call(user, "harmless").stdout == "42\n"
    for function, placeholder in (("harmful", "vendorAdd"), ("plain", "plainAdd")):
        refused = call(user, function)
        assert refused.returncode != 0
        assert f"{placeholder} was called" in refused.stderr
        assert "DEVICE=gpu" in refused.stderr
