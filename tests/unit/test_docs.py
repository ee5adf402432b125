"""Documents say what is so.

test_links                  every relative link and every named path of the documents exists
test_variables              README's table lists the variables of envs.py, all of them
test_backend_names          README's table lists the registry's names
test_faults                 every test that the page of faults names exists
test_kernel_docstrings      every public function of glm_kernels states its arguments' shapes
test_layers                 architecture.md names every package, and the import rule as it is enforced
test_named_files            architecture.md names files and folders that are where it says
test_matrices               a test module that lists its tests lists all of them, and no others
test_nothing_of_workplaces  no document or source names a folder of somebody's machine
"""

import ast
import fnmatch
import importlib
import inspect
import pkgutil
import re
import tomllib
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
    # Ids without addresses: workers of a parallel run must name the same tests.
    ("name", "function"),
    [pytest.param(*found, id=found[0]) for found in public_functions()],
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


def test_layers() -> None:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (rule,) = (contract for contract in linter["contracts"] if contract["type"] == "layers")
    layers = [layer.replace("sglang_glm.", "").split(" | ") for layer in rule["layers"]]
    assert " → ".join(", ".join(layer) for layer in layers) + " → glm_kernels" in text
    on_disk = {
        path.stem for path in (ROOT / "sglang_glm").glob("[a-z]*") if path.name != "py.typed"
    }
    assert {name for layer in layers for name in layer} == on_disk
    assert [name for name in sorted(on_disk) if f"`sglang_glm.{name}`" not in text] == []


def test_named_files() -> None:
    """A paragraph about a package names files by their path in it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = text[text.index("## Packages") : text.index("## Which imports")]
    checked = 0
    for paragraph in packages.split("\n\n"):
        opening = re.match(r"`([\w./]+)`", paragraph)
        if opening is None:
            continue
        folder = ROOT / opening[1].replace(".", "/")
        folder = ROOT / "kernels" / "glm_kernels" if opening[1] == "glm_kernels" else folder
        for name in re.findall(r"`([\w/]+(?:\.(?:py|sh)|/))`", paragraph):
            if name == "__init__.py" or (ROOT / name).is_dir():
                continue
            assert (folder / name).exists(), f"{opening[1]}: {name}"
            checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    "module",
    sorted((ROOT / "tests").rglob("test_*.py")),
    ids=lambda path: str(path.relative_to(ROOT / "tests")),
)
def test_matrices(module: Path) -> None:
    tree = ast.parse(module.read_text())
    rows = re.findall(r"^test_.*", ast.get_docstring(tree) or "", re.MULTILINE)
    # A row is "test_a, test_b  what they catch"; a name may be a pattern.
    listed = [name for row in rows for name in re.findall(r"(?:^|, )(test_[\w*]+)", row)]
    tests = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    covered = {test for test in tests for name in listed if fnmatch.fnmatch(test, name)}
    assert not listed or covered == tests, f"not listed: {sorted(tests - covered)}"
    missing = [name for name in listed if not fnmatch.filter(tests, name)]
    assert not missing, f"listed, not there: {missing}"


def test_nothing_of_workplaces() -> None:
    own = re.compile(r"(?<![\w.])/(root|home|work|Users|mnt)/")
    for top in ROOT.iterdir():
        if top.name.startswith(".") and top.is_dir():
            continue  # environments and caches
        for path in (top, *top.rglob("*")):
            if path.suffix in (".md", ".py", ".sh", ".toml", ".yaml", ".json", ".jsonl"):
                found = own.search(path.read_text()) if path != Path(__file__) else None
                assert found is None, f"{path.relative_to(ROOT)}: {found}"
