"""Fixtures of every test: seeds, GPU markers, one real server at a time."""

import hashlib
import random
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.support.server import Server, ServerPool, server_pool

# A shared machine stops a test for longer than hypothesis' 200 ms; that says nothing of the code.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Seed every generator from the test's name, so that a test alone sees what it saw in the suite."""
    name = request.node.nodeid.split("@")[0]  # A run in parallel appends the group.
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def pool() -> Iterator[ServerPool]:
    yield from server_pool()


@pytest.fixture
def server(pool: ServerPool, request: pytest.FixtureRequest) -> Server:
    """The server of the module's `SERVER` spec, or of the spec that `@pytest.mark.parametrize` gives."""
    spec = getattr(request, "param", None) or request.module.SERVER
    return pool.get(spec)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Server tests last, those of one spec together: a spec is started once.

    In a run in parallel (`--dist loadgroup`) they stay together too, and so do the tests of a file.
    """

    def key(item: pytest.Item) -> str:
        callspec = getattr(item, "callspec", None)
        spec = callspec.params.get("server") if callspec else None
        spec = spec or getattr(item.module, "SERVER", None)
        uses_server = "server" in getattr(item, "fixturenames", ())
        return f"1{spec}" if uses_server else "0"

    items.sort(key=key)
    for item in items:
        group = key(item)
        name = item.path.name if group == "0" else hashlib.sha256(group.encode()).hexdigest()[:8]
        item.add_marker(pytest.mark.xdist_group(name))
