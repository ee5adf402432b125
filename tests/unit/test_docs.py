"""Documents say what is so.

test_links                  every relative link and every named path of the documents exists
test_variables              README's table lists the variables of envs.py, all of them
test_backend_names          README's table lists the registry's names
test_faults                 every test that the page of faults names exists
test_kernel_docstrings      every public function of glm_kernels states its arguments' shapes
test_nothing_of_workplaces  no document or source names a machine's paths
"""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import glm_kernels
import pytest

from sglang_glm import envs
from sglang_glm.attention import registry
from tests.support.documents import DOCUMENTS, ROOT


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for path in re.findall(
        r"`((?:sglang_glm|kernels|tests|docs|launch|cookbook)/[\w./-]+\.\w+)`", text
    ):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_variables() -> None:
    rows = re.findall(r"^\| `(SGLANG_GLM_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(variable.name for variable in envs.ALL)


def test_backend_names() -> None:
    text = (ROOT / "README.md").read_text()
    for phase, default in registry.HOST_DEFAULTS.items():
        host, cuda = (
            ", ".join(f"`{name}`" for name in registry.names(phase, device))
            for device in ("cpu", "cuda")
        )
        assert f"| `--dsa-{phase}-backend` | {host} | `{default}` | {cuda} |" in text


def test_faults() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def public_functions() -> list[tuple[str, object]]:
    found = []
    for info in pkgutil.walk_packages(glm_kernels.__path__, "glm_kernels."):
        tail = info.name.rsplit(".", 1)[1]
        if (
            info.ispkg
            or tail.startswith("_")
            or tail.endswith(("_ref", "_torch", "_triton", "_sm90"))
        ):
            continue
        if ".testing." in info.name or ".bench." in info.name:
            continue
        module = importlib.import_module(info.name)
        found += [
            (f"{info.name}.{name}", function)
            for name, function in inspect.getmembers(module, inspect.isfunction)
            if function.__module__ == info.name and not name.startswith(("_", "check_"))
        ]
    return found


@pytest.mark.parametrize(
    ("name", "function"), public_functions(), ids=lambda value: str(value)[-40:]
)
def test_kernel_docstrings(name: str, function: object) -> None:
    text = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    assert text, name
    tensors = [p for p, spec in parameters.items() if "Tensor" in str(spec.annotation)]
    for parameter in tensors:
        assert re.search(rf"^\s*{parameter}: .*``\[", text, re.MULTILINE), (
            f"{name}: shape of {parameter}"
        )


def test_nothing_of_workplaces() -> None:
    for path in ROOT.rglob("*"):
        if path.suffix in (".md", ".py", ".sh", ".toml", ".yaml") and not {
            ".venv",
            ".git",
            ".cache",
        } & set(path.parts):
            if path == Path(__file__):
                continue
            assert not re.search(r"/work/(main|shared|wt)|/root/", path.read_text()), path
