"""The index scan of one layer, whole on every rank and divided over them, with our kernels.

Divided by request as the server does it, where there are as many as ranks; divided by history in every
case. Lengths are equal: the ranks have the same work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.paged_mqa_logits import paged_mqa_logits
from glm_kernels.testing.generate import PagedIndexer, paged_indexer
from glm_kernels.testing.shapes import IndexerShape

from sglang_glm.layers.verify_selection import select_verify_rows
from sglang_glm.parallel.index_scan import (
    gather_candidates,
    history_share,
    local_candidates,
    merge_candidates,
)
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.index_scan import gpu_scan_costs
from sglang_glm.planning.released import load_config

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks

CASES = (
    (1, 1, 32_768),
    (1, 1, 131_072),
    (1, 1, 1_048_576),
    (8, 6, 32_768),
    (8, 6, 131_072),
    (32, 6, 131_072),
    (2, 6, 1_048_576),
)


def row_ends(p: PagedIndexer) -> torch.Tensor:
    """`[rows]` int32: how many positions each row sees."""
    next_n = p.q.shape[1]
    steps = torch.arange(next_n, device=p.q.device, dtype=torch.int32)
    return (p.cache_seqlens[:, None] - next_n + 1 + steps).flatten()


def select(
    p: PagedIndexer, row_tables: torch.Tensor, topk: int, ranks: Ranks | None
) -> torch.Tensor:
    """The server's selection of positions, of one rank that scores everything, or divided by request.

    Args:
        p: The problem.
        row_tables: `[rows, pages]`, each request's table once for each of its rows, as SGLang has it.
        topk: Entries a row.
        ranks: Those that divide the requests, or None.
    """
    return select_verify_rows(
        p.q.flatten(0, 1),
        p.weights.flatten(0, 1),
        p.index_cache,
        p.cache_seqlens,
        row_tables,
        topk,
        return_slots=False,
        divided_over=ranks,
    )


def own_share(p: PagedIndexer, share: range, length: int) -> PagedIndexer:
    """The problem that scores one share of equally long histories.

    Scoring lets row t see up to the newest positions, so a share that is not the last pretends to
    end so many positions later that its first row sees all of it.
    """
    is_last = share.stop == length
    seen = len(share) if is_last else len(share) + p.q.shape[1] - 1
    first, last = share.start // PAGE_SIZE, -(-(share.start + seen) // PAGE_SIZE)
    return PagedIndexer(
        q=p.q,
        index_cache=p.index_cache,
        weights=p.weights,
        cache_seqlens=torch.full_like(p.cache_seqlens, seen),
        block_table=p.block_table[:, first:last].contiguous(),
        max_context=(last - first) * PAGE_SIZE,
    )


def select_by_history(
    part: PagedIndexer, ends: torch.Tensor, share: range, topk: int
) -> torch.Tensor:
    """The selection when each rank scores its share of every history."""
    logits = paged_mqa_logits(
        part.q,
        part.index_cache,
        part.weights,
        part.cache_seqlens,
        part.block_table,
        part.max_context,
        fill=False,
    )
    own = local_candidates(logits, ends.clamp_max(share.stop), share.start, topk)
    return merge_candidates(gather_candidates(own, dist.group.WORLD), topk)


def run(ranks: Ranks, cases: tuple[tuple[int, int, int], ...] = CASES) -> None:
    """Same selection, then the time of each form, beside the prediction."""
    config = load_config("zai-org/GLM-5.3")
    costs = gpu_scan_costs(config, find_gpu("h200"))
    for batch_size, next_n, length in cases:
        shape = IndexerShape(name="scan", lengths=(length,) * batch_size, next_n=next_n)
        p = paged_indexer(shape, 0, ranks.device, spare_pages=0)
        ends, topk = row_ends(p), shape.topk
        tables = p.block_table.repeat_interleave(next_n, 0)
        share = history_share(length, ranks.rank, ranks.world_size)
        part = own_share(p, share, length)
        scanned = [(next_n, length)] * batch_size
        sizes = {"index_topk": topk, "world_size": ranks.world_size}
        forms = {
            "by_history": (
                lambda p=part, e=ends, s=share, k=topk: select_by_history(p, e, s, k),
                costs.saved_us(scanned, **sizes),
            )
        }
        if batch_size >= ranks.world_size:
            forms["by_request"] = (
                lambda p=p, t=tables, k=topk: select(p, t, k, ranks),
                costs.saved_by_request_us(scanned, **sizes),
            )
        whole = select(p, tables, topk, None)
        whole_us = ranks.times_us(lambda p=p, t=tables, k=topk: select(p, t, k, None), graph=True)[
            "time_us"
        ]
        for form, (divided, predicted_us) in forms.items():
            differing = int(ranks.most((whole != divided()).any(dim=1).sum()))
            times = ranks.times_us(divided, graph=True)
            ranks.row(
                op="index_scan",
                form=form,
                shape=f"{ranks.world_size} ranks, {batch_size}x{length} n{next_n}",
                dtype="e4m3",
                **times,
                whole_us=whole_us,
                saved_us=round(whole_us - times["time_us"], 2),
                predicted_whole_us=round(costs.scan_us(scanned), 2),
                predicted_saved_us=round(predicted_us, 2),
                max_error=differing,
            )
            assert not differing, f"{form}: {differing} rows select differently when divided"
