"""Versions and accelerators."""

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_glm.diagnosis.findings import Finding

#: What the test suite ran with last; SGLang pins these itself, so they differ only by hand.
TESTED = {"torch": "2.14.1", "transformers": "5.19.0"}


def sglang_requirement() -> Requirement:
    """The range of SGLang that this package declares, installed or run from its source tree."""
    try:
        lines = requires("sglang-glm") or []
    except PackageNotFoundError:
        source = Path(__file__).parents[2] / "pyproject.toml"
        lines = tomllib.loads(source.read_text(encoding="utf-8"))["project"]["dependencies"]
    declared = map(Requirement, lines)
    return next(requirement for requirement in declared if requirement.name == "sglang")


def check_versions() -> Iterator[Finding]:
    """SGLang within the declared range; the others beside what was tested."""
    requirement = sglang_requirement()
    try:
        found = version("sglang")
    except PackageNotFoundError:
        yield Finding(
            part="versions",
            name="sglang",
            state="failed",
            detail="not installed",
            remedy=f"pip install '{requirement}'",
        )
        return
    fits = requirement.specifier.contains(Version(found))
    yield Finding(
        part="versions",
        name="sglang",
        state="ok" if fits else "failed",
        detail=f"{found}, expected {requirement.specifier}",
        remedy="" if fits else f"pip install '{requirement}'",
    )
    for name, tested in TESTED.items():
        found = version(name)
        same = Version(found).base_version == tested
        yield Finding(
            part="versions",
            name=name,
            state="ok" if same else "warning",
            detail=f"{found}, tested with {tested}",
        )


def check_accelerators() -> Iterator[Finding]:
    """Every CUDA device, or what serves in its place."""
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            part="accelerators",
            name="cuda",
            state="not needed",
            detail="none; this package serves on the CPU here",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            part="accelerators",
            name=f"cuda:{index}",
            state="ok",
            detail=f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 1e9:.0f} GB",
        )
