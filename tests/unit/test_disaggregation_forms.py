"""What stands in for SGLang's transfer classes between CPU servers.

test_agent_sees_host_memory    every kind of memory that SGLang names reaches NIXL as host memory
test_untyped_stays             a list that carries its own memory kind keeps it
test_owned_state_pages         of a sharded cache each rank sends its own index pages, to their own places
test_unequal_pages             are refused: a page would land in another's place
test_forms                     only the two classes that need a CUDA device are replaced
"""

from __future__ import annotations

import numpy as np
import pytest
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

from sglang_glm.compat.host.disaggregation import host_agent, kv_class, owned_state_pages
from sglang_glm.parallel.page_shards import PageShard


class Agent:
    """NIXL's agent as SGLang calls it; returns what it was given."""

    def register_memory(self, reg_list, mem_type=None, backends=()):
        return reg_list, mem_type, backends

    def get_xfer_descs(self, descs, mem_type=None):
        return descs, mem_type

    def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, backends=()):
        return agent_name, xfer_list, mem_type, backends

    def get_plugin_list(self):
        return ["UCX"]


@pytest.mark.parametrize("kind", ["VRAM", "DRAM"])
def test_agent_sees_host_memory(kind: str) -> None:
    agent = host_agent(Agent)()
    assert agent.register_memory([1], kind, ["UCX"]) == ([1], "DRAM", ["UCX"])
    assert agent.get_xfer_descs([2], kind) == ([2], "DRAM")
    assert agent.prep_xfer_dlist("peer", [3], kind) == ("peer", [3], "DRAM", ())
    assert agent.get_plugin_list() == ["UCX"]


def test_untyped_stays() -> None:
    agent = host_agent(Agent)()
    assert agent.register_memory([1]) == ([1], None, ())
    assert agent.get_xfer_descs([2]) == ([2], None)
    assert agent.prep_xfer_dlist("peer", [3]) == ("peer", [3], None, ())


def test_owned_state_pages() -> None:
    pages, places = np.array([7, 2, 9, 4, 3], dtype=np.int32), [50, 51, 52, 53, 54]
    sent = {}
    for rank in range(3):
        shard = PageShard(rank=rank, world_size=3)
        (own, none), (targets, nowhere) = owned_state_pages([pages, None], [places, []], shard)
        assert none is None and nowhere == []
        for page, place in zip(own, targets, strict=True):
            sent[place] = page * 3 + rank
    assert [sent[place] for place in places] == pages.tolist()


def test_unequal_pages() -> None:
    with pytest.raises(RuntimeError, match="2 are to be sent to 1 places"):
        owned_state_pages([[2, 3]], [[1]], PageShard(rank=0, world_size=2))


class Stock:
    supports_host_tensor_indices = True


@pytest.mark.parametrize("backend", TransferBackend)
@pytest.mark.parametrize("kind", KVClassType)
def test_forms(backend: TransferBackend, kind: KVClassType) -> None:
    found = kv_class(Stock, backend, kind)
    replaced = (backend, kind) in (
        (TransferBackend.NIXL, KVClassType.MANAGER),
        (TransferBackend.MOONCAKE, KVClassType.SENDER),
    )
    assert (found is not Stock) == replaced
    assert issubclass(found, Stock)
    if kind == KVClassType.SENDER:
        assert found.supports_host_tensor_indices == (backend != TransferBackend.MOONCAKE)
    assert kv_class(None, backend, kind) is None
