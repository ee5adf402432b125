"""References in fp64, vectorised enough for a GPU's shapes, on the inputs as quantised."""

import torch

from glm_kernels.cache.index_pages import load_index_k_fp8
from glm_kernels.cache.mla_rows import unpack_mla_rows
from glm_kernels.testing.generate import PagedIndexer, SparseMla


def paged_logits_fp64(p: PagedIndexer) -> torch.Tensor:
    """Scores of a paged problem.

    Args:
        p: arguments of ``paged_mqa_logits``.

    Returns:
        ``[batch_size * next_n, max_context]``, fp64, ``-inf`` from each row's length on.
    """
    batch_size, next_n = p.q.shape[:2]
    shape = batch_size * next_n, p.max_context
    out = torch.full(shape, float("-inf"), dtype=torch.float64, device=p.q.device)
    for request, length in enumerate(p.cache_seqlens.tolist()):
        for row in range(next_n):
            seen = length - next_n + row + 1
            for first in range(0, max(seen, 0), 16384):
                position = torch.arange(first, min(first + 16384, seen), device=p.q.device)
                slots = p.block_table[request, position // 64].long() * 64 + position % 64
                codes, scale = load_index_k_fp8(p.index_cache, slots)
                keys = codes.double() * scale.double()[:, None]
                dots = (keys @ p.q[request, row].double().T).clamp_min(0)  # [positions, heads]
                scores = dots @ p.weights[request, row].double()
                out[request * next_n + row, first : first + position.numel()] = scores
    return out


def sparse_mla_fp64(x: SparseMla) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a sparse MLA problem.

    Args:
        x: arguments of ``sparse_mla``.

    Returns:
        ``[num_tokens, num_heads, 512]`` and ``[num_tokens, num_heads]``, fp64.
    """
    num_tokens, num_heads, _ = x.q.shape
    out = torch.zeros(num_tokens, num_heads, 512, dtype=torch.float64, device=x.q.device)
    lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float64, device=x.q.device)
    for token in range(num_tokens):
        chosen = x.slots[token][x.slots[token] >= 0].long()
        if chosen.numel() == 0:
            continue
        rows = x.kv_cache[chosen, 0]
        rows = unpack_mla_rows(rows, torch.float64) if rows.dtype == torch.uint8 else rows.double()
        scores = x.q[token].double() @ rows.T * x.softmax_scale  # [heads, chosen]
        lse[token] = scores.logsumexp(-1)
        out[token] = scores.softmax(-1) @ rows[:, :512]
    return out, lse
