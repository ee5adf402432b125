"""What is installed and what is not.

test_kernels_is_theirs      `import kernels` from the repository's root finds the other distribution
test_wheel_contents         both packages and their data, no tests, launch or cookbook
test_entry_points           SGLang finds the plugin and the platform by metadata
test_light_import           importing the package costs neither torch nor SGLang
"""

import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]


def test_kernels_is_theirs() -> None:
    code = "import kernels; print(kernels.__file__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not Path(result.stdout.strip()).is_relative_to(ROOT / "kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = find_spec("kernels")
    assert spec is not None and spec.origin is not None


def test_wheel_contents() -> None:
    include = ["sglang_glm*", "glm_kernels*"]
    found = {
        *find_packages(str(ROOT), include=include),
        *find_packages(str(ROOT / "kernels"), include=include),
    }
    assert {"sglang_glm", "sglang_glm.compat.host", "glm_kernels", "glm_kernels.indexer"} <= found
    assert all(name.split(".")[0] in ("sglang_glm", "glm_kernels") for name in found)
    on_disk = {
        ".".join(path.parent.relative_to(root).parts)
        for root in (ROOT, ROOT / "kernels")
        for top in ("sglang_glm", "glm_kernels")
        for path in (root / top).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert on_disk <= found, "a folder with code lacks __init__.py"


def test_entry_points() -> None:
    for group, value in {
        "sglang.srt.plugins": "sglang_glm.plugin:register",
        "sglang.srt.platforms": "sglang_glm.platform:activate",
    }.items():
        assert [e.value for e in entry_points(group=group) if e.name == "sglang_glm"] == [value]


def test_light_import() -> None:
    code = (
        "import sys, sglang_glm, sglang_glm.plugin, sglang_glm.config, sglang_glm.envs; "
        "print(sorted({'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
