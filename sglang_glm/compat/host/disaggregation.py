"""Prefill/decode disaggregation between CPU servers: what moves the cache moves host memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_glm.parallel.page_shards import PageShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HOST_KIND = "DRAM"


def kv_class(found: type | None, transfer_backend: Any, class_type: Any) -> type | None:
    """AFTER hook of `get_kv_class`: a form for host memory where SGLang's needs a CUDA device.

    Args:
        found: SGLang's class.
        transfer_backend: Its `TransferBackend`.
        class_type: Its `KVClassType`.
    """
    make = _HOST_FORMS.get((transfer_backend.value, class_type.value))
    return found if found is None or make is None else make(found)


def _nixl_manager(stock: type) -> type:
    """SGLang's NIXL manager with an agent that calls every buffer host memory.

    Of a sharded cache each rank sends its own index pages, as SGLang's does with latents; stock NIXL
    would read the pages of all ranks from each.
    """

    class HostNixlKVManager(stock):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _host_agents():
                super().__init__(*args, **kwargs)

        def maybe_send_extra(
            self,
            peer_name: str,
            prefill_state_indices: list[Any],
            dst_state_data_ptrs: list[Any],
            dst_state_indices: list[Any],
            *args: Any,
            **kwargs: Any,
        ) -> Iterator[Any]:
            if self.kv_shard_size > 1:
                prefill_state_indices, dst_state_indices = owned_state_pages(
                    prefill_state_indices,
                    dst_state_indices,
                    PageShard(rank=self.kv_shard_rank, world_size=self.kv_shard_size),
                )
            return super().maybe_send_extra(
                peer_name,
                prefill_state_indices,
                dst_state_data_ptrs,
                dst_state_indices,
                *args,
                **kwargs,
            )

    return HostNixlKVManager


def owned_state_pages(
    sources: list[Any], targets: list[Any], shard: PageShard
) -> tuple[list[Any], list[Any]]:
    """What one rank of a sharded cache sends of a request's index pages, and where to.

    Args:
        sources: Of each kind of state, logical pages of the request; None where it has none. On the
            CPU index pages are the only kind.
        targets: Of each, the pages of the decode server.
        shard: The rank.

    Returns:
        Pages of this rank's cache, and the decode server's for these.

    Raises:
        RuntimeError: the decode server has room for another number of pages.
    """
    own_sources: list[Any] = []
    own_targets: list[Any] = []
    for pages, places in zip(sources, targets, strict=False):
        if pages is not None and len(pages) != len(places):
            raise RuntimeError(
                f"index pages: {len(pages)} are to be sent to {len(places)} places, expected as many"
            )
        pairs = [
            (int(page) // shard.world_size, int(place))
            for page, place in zip(pages if pages is not None else (), places, strict=False)
            if int(page) % shard.world_size == shard.rank
        ]
        own_sources.append(None if pages is None else [page for page, _ in pairs])
        own_targets.append([place for _, place in pairs])
    return own_sources, own_targets


@contextmanager
def _host_agents() -> Iterator[None]:
    """SGLang takes the agent's class from NIXL while it builds its manager."""
    from nixl import _api

    stock = _api.nixl_agent
    _api.nixl_agent = host_agent(stock)
    try:
        yield
    finally:
        _api.nixl_agent = stock


def host_agent(stock: type) -> type:
    """A NIXL agent for which memory of every kind lies in host memory.

    SGLang registers caches as device memory ("VRAM"), which UCX refuses without CUDA.

    Args:
        stock: NIXL's agent class.
    """

    class HostAgent(stock):  # type: ignore[misc, valid-type]
        def register_memory(
            self, reg_list: Any, mem_type: str | None = None, *args: Any, **kwargs: Any
        ) -> Any:
            return super().register_memory(reg_list, mem_type and _HOST_KIND, *args, **kwargs)

        def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
            return super().get_xfer_descs(descs, mem_type and _HOST_KIND)

        def prep_xfer_dlist(
            self,
            agent_name: str,
            xfer_list: Any,
            mem_type: str | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            return super().prep_xfer_dlist(
                agent_name, xfer_list, mem_type and _HOST_KIND, *args, **kwargs
            )

    return HostAgent


def _mooncake_sender(stock: type) -> type:
    """SGLang's Mooncake sender, which takes its page numbers at once instead of behind a CUDA event."""

    class HostMooncakeKVSender(stock):  # type: ignore[misc, valid-type]
        supports_host_tensor_indices = False

    return HostMooncakeKVSender


_HOST_FORMS: dict[tuple[str, str], Callable[[type], type]] = {
    ("nixl", "manager"): _nixl_manager,
    ("mooncake", "sender"): _mooncake_sender,
}
