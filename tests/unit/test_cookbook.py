"""The cookbook is complete, and each recipe says what it is.

test_index          the index lists every recipe, and nothing else
test_docstrings     Needs, Run, Expect, and the file's own name in its command
test_every_tested   each recipe is run by a test against a server
test_dashboard      the dashboard's shape, and metrics that SGLang has
test_fails          no server: exit 1 and a reason
test_capacity       08 without a server
"""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.support.recipes import COOKBOOK, RECIPES, run_recipe


def test_index() -> None:
    text = (COOKBOOK / "README.md").read_text()
    assert re.findall(r"^\| \[(\d\d_\w+\.py)\]\(\1\)", text, re.MULTILINE) == RECIPES
    assert len(RECIPES) >= 11


@pytest.mark.parametrize("name", RECIPES)
def test_docstrings(name: str) -> None:
    doc = ast.get_docstring(ast.parse((COOKBOOK / name).read_text())) or ""
    for word in ("Needs:", "Run:", "Expect:", f"cookbook/{name}"):
        assert word in doc, word


def test_every_tested() -> None:
    tested = (Path(__file__).parents[1] / "server" / "test_cookbook.py").read_text()
    assert [name for name in RECIPES if f'"{name}"' not in tested] == []


def test_dashboard() -> None:
    spec = importlib.util.spec_from_file_location("metrics", COOKBOOK / "10_metrics.py")
    assert spec is not None and spec.loader is not None
    dashboard = json.loads((COOKBOOK / "grafana" / "dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 10 and len({panel["id"] for panel in dashboard["panels"]}) > len(panels)
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    root = Path(next(iter(sglang.submodule_search_locations)))
    known = set(
        re.findall(r"sglang:\w+", (root / "srt/observability/metrics_collector.py").read_text())
    )
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"sglang:\w+", target["expr"])
            assert names, target
            # A histogram's buckets carry a suffix.
            assert {name.removesuffix("_bucket") for name in names} <= known, names


@pytest.mark.parametrize("name", ["01_chat.py", "10_metrics.py"])
def test_fails(name: str) -> None:
    result = run_recipe(name, "--url", "http://127.0.0.1:9")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("failed: http://127.0.0.1:9/")
    assert "start the server (make serve), or give --url" in result.stderr


def test_capacity() -> None:
    result = run_recipe("08_capacity_planning.py", "--context", "64k", "--concurrency", "16")
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()[2:]
    assert len(rows) == 4 and all(int(row.split()[-1]) > 0 for row in rows)
