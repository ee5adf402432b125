"""Selection on CUDA in its torch forms: what `glm_exact` returns to SGLang, and who scores verify rows.

test_paged, test_paged_prefill         slots, with a page table a row or a request
test_ragged, test_unfused              places among a batch's keys; request-local positions
test_resolve                           target and draft ask for their selection by flags of their own
test_verify_rows                       one pass over a request's keys equals row by row
test_who_selects                       flags, batch sizes and shapes that stay with SGLang
test_named_selection_serves_any_batch  a flag that names ours leaves nothing to measurements
test_other_phases_are_sglangs          prefill and decode pass through
test_divided_rows                      ranks that each select for some requests give what one gives
test_divided_prefill                   the same of a prefill's rows, ragged or paged, at once or in chunks
test_prefill_alone                     one rank, and a batch without requests, are SGLang's
test_who_divides                       when told, with several ranks and no fewer requests
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glm_kernels.indexer.paged_mqa_logits import paged_mqa_logits
from glm_kernels.indexer.topk_indices import positions_to_slots, topk_indices
from glm_kernels.testing.generate import paged_indexer
from glm_kernels.testing.shapes import IndexerShape
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_glm.compat.cuda import dsa_indexer
from sglang_glm.compat.cuda.dsa_topk_backend import ExactTopk, resolve

PAGED, RAGGED = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED


def scores(rows: int, width: int) -> torch.Tensor:
    # Few distinct values, so that ties decide.
    return torch.randint(0, 7, (rows, width), generator=torch.Generator().manual_seed(2)).float()


def best(row: torch.Tensor, k: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:k]
    return order + [-1] * (k - len(order))


def test_paged() -> None:
    logits, lengths = scores(4, 256), torch.tensor([3, 200, 256, 0], dtype=torch.int32)
    table = torch.randperm(16).view(4, 4).int()
    metadata = SimpleNamespace(real_page_table=table, token_to_batch_idx=None)
    got = ExactTopk().topk_transform(logits, lengths, 5, PAGED, metadata)
    for row, length in enumerate(lengths.tolist()):
        want = [
            -1 if p < 0 else int(table[row, p // 64]) * 64 + p % 64
            for p in best(logits[row, :length], 5)
        ]
        assert got[row].tolist() == want


def test_paged_prefill() -> None:
    # Two requests of 3 and 2 new rows share one matrix of scores.
    starts = torch.tensor([0, 0, 0, 70, 70], dtype=torch.int32)
    lengths = torch.tensor([68, 69, 70, 3, 4], dtype=torch.int32)
    owners = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    table = torch.tensor([[4, 9], [2, 0]], dtype=torch.int32)
    metadata = SimpleNamespace(real_page_table=table, token_to_batch_idx=owners)
    logits = scores(5, 80)
    got = ExactTopk().topk_transform(logits, lengths, 6, PAGED, metadata, row_starts=starts)
    chunk = ExactTopk().topk_transform(
        logits[2:],
        lengths[2:],
        6,
        PAGED,
        metadata,
        row_starts=starts[2:],
        batch_idx_list=owners[2:],
    )
    assert torch.equal(got[2:], chunk)
    for row in range(5):
        start, length, owner = int(starts[row]), int(lengths[row]), int(owners[row])
        want = [
            -1 if p < 0 else int(table[owner, p // 64]) * 64 + p % 64
            for p in best(logits[row, start : start + length], 6)
        ]
        assert got[row].tolist() == want
    with pytest.raises(ValueError, match="context-parallel"):
        ExactTopk().topk_transform(logits, lengths, 6, PAGED, metadata, batch_idx_list=[0])
    metadata.token_to_batch_idx = None
    with pytest.raises(ValueError, match="5 rows"):
        ExactTopk().topk_transform(logits, lengths, 6, PAGED, metadata)


def test_ragged() -> None:
    logits, lengths = scores(3, 90), torch.tensor([2, 40, 41], dtype=torch.int32)
    offsets = torch.tensor([0, 49, 49], dtype=torch.int32)
    got = ExactTopk().topk_transform(
        logits, lengths, 4, RAGGED, None, topk_indices_offset=offsets, row_starts=offsets
    )
    for row in range(3):
        start = int(offsets[row])
        window = logits[row, start : start + int(lengths[row])]
        assert got[row].tolist() == [p if p < 0 else p + start for p in best(window, 4)]
    with pytest.raises(ValueError, match="offsets"):
        ExactTopk().topk_transform(logits, lengths, 4, RAGGED, None)


def test_unfused() -> None:
    logits, lengths = scores(3, 50), torch.tensor([2, 40, 50], dtype=torch.int32)
    got = ExactTopk().topk_transform(
        logits, lengths, 4, PAGED, SimpleNamespace(), force_unfused_topk=True
    )
    for row in range(3):
        assert got[row].tolist() == best(logits[row, : int(lengths[row])], 4)


def test_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "sglang_glm.compat.cuda.dsa_topk_backend"
    kernel = SimpleNamespace(kernel=SimpleNamespace(dsa_topk_backend="glm_exact"))
    monkeypatch.setattr(f"{module}.get_exec", lambda: kernel)
    spec = SimpleNamespace(speculative_dsa_topk_backend="sgl-kernel")
    monkeypatch.setattr(f"{module}.get_spec", lambda: spec)

    def original(cls: type, runner: Any) -> str:
        return "stock"

    target, draft = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)
    assert resolve(original, object, target) == ExactTopk()
    assert resolve(original, object, draft) == "stock"


class Metadata:
    """What SGLang's indexer hands to paged scoring."""

    force_unfused_topk = False

    def __init__(self, lengths: torch.Tensor, table: torch.Tensor, topk_backend: Any) -> None:
        self.lengths, self.table, self.topk_backend = lengths, table, topk_backend

    def get_seqlens_int32(self) -> torch.Tensor:
        return self.lengths

    def get_page_table_64(self) -> torch.Tensor:
        return self.table


def indexer(pages: torch.Tensor | None = None, **fields: Any) -> SimpleNamespace:
    defaults = {
        "n_heads": 32,
        "index_topk": 16,
        "num_init_tokens": 0,
        "num_local_tokens": 0,
        "paged_mqa_logits_backend": SimpleNamespace(is_deepgemm=lambda: True),
        "_get_index_k_read_buffer": lambda pool, layer_id: pages,
    }
    return SimpleNamespace(**{**defaults, **fields})


STOCK_TOPK = SimpleNamespace(is_sgl_kernel=lambda: True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsa_indexer, "_capability", lambda: (9, 0))
    monkeypatch.setattr(dsa_indexer, "load_verify_kernels", lambda *args: None)
    monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("unfused", [False, True])
def test_verify_rows(unfused: bool) -> None:
    shape = IndexerShape(name="v", lengths=(3, 130, 64, 0), next_n=3)
    p = paged_indexer(shape)
    rows, width = 12, p.block_table.shape[1] * 64
    metadata = Metadata(p.cache_seqlens, p.block_table.repeat_interleave(3, 0), STOCK_TOPK)
    metadata.force_unfused_topk = unfused
    padding = 2
    q = torch.cat([p.q.flatten(0, 1), p.q[0, :padding]])
    weights = torch.cat([p.weights.flatten(0, 1), p.weights[0, :padding]]).unsqueeze(-1)
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)

    def original(*args: Any) -> None:
        pytest.fail("SGLang scored the rows")

    got = dsa_indexer.get_topk_paged(
        original, indexer(p.index_cache), batch, 0, q, weights, metadata
    )
    logits = paged_mqa_logits(p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table, width)
    want = topk_indices(logits, 16)
    if not unfused:
        want = positions_to_slots(want, p.block_table, 64)
    assert got.shape == (rows + padding, 16)
    assert torch.equal(got[:rows], want) and (got[rows:] == -1).all()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("fields", "topk_backend", "requests", "next_n", "word"),
    [
        ({}, STOCK_TOPK, 3, 6, "fewer"),
        ({}, SimpleNamespace(is_sgl_kernel=lambda: False), 8, 6, "another selection"),
        ({"num_init_tokens": 4}, STOCK_TOPK, 8, 6, "always selected"),
        ({"n_heads": 24}, STOCK_TOPK, 8, 6, "24"),
        ({}, STOCK_TOPK, 8, 9, "9 rows"),
        (
            {"paged_mqa_logits_backend": SimpleNamespace(is_deepgemm=lambda: False)},
            STOCK_TOPK,
            8,
            6,
            "another scoring",
        ),
    ],
)
def test_who_selects(
    fields: dict, topk_backend: Any, requests: int, next_n: int, word: str
) -> None:
    metadata = SimpleNamespace(topk_backend=topk_backend)
    choice = dsa_indexer.choose(indexer(**fields), metadata, requests, requests * next_n)
    assert choice.form == "stock" and word in choice.reason


@pytest.mark.usefixtures("hopper")
def test_named_selection_serves_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, default = (SimpleNamespace(topk_backend=b) for b in (ExactTopk(), STOCK_TOPK))
    assert dsa_indexer.choose(indexer(), exact, 1, 6).form == "glm_verify"
    assert dsa_indexer.choose(indexer(), default, 16, 96).form == "glm_verify"
    monkeypatch.setenv("SGLANG_GLM_CUDA_KERNELS", "named")
    assert dsa_indexer.choose(indexer(), exact, 1, 6).form == "glm_verify"
    assert dsa_indexer.choose(indexer(), default, 16, 96).form == "stock"


def test_other_phases_are_sglangs() -> None:
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    got = dsa_indexer.get_topk_paged(
        lambda *args: args[1:], "indexer", batch, 3, "q", "weights", "metadata"
    )
    assert got == (batch, 3, "q", "weights", "metadata")


class Ranks:
    """The ranks of a group, one after the other: what each sends is kept until all have sent."""

    def __init__(self, world_size: int) -> None:
        self.rank_in_group, self.world_size = 0, world_size
        self.sent: list[torch.Tensor] = []

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.sent.append(input)
        if len(self.sent) == self.world_size:
            output.copy_(torch.cat(self.sent))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("unfused", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "lengths", [(3, 130, 64, 0), (200, 3, 90, 65, 130), (7, 300, 64, 80, 9, 1)]
)
def test_divided_rows(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], world_size: int, unfused: bool
) -> None:
    monkeypatch.setenv("SGLANG_GLM_DIVIDE_INDEX_SCAN", "on")
    ranks = Ranks(world_size)
    monkeypatch.setattr(dsa_indexer, "get_parallel", lambda: SimpleNamespace(attn_tp_group=ranks))
    p = paged_indexer(IndexerShape(name="d", lengths=lengths, next_n=3))
    exact = ExactTopk()
    metadata = Metadata(p.cache_seqlens, p.block_table.repeat_interleave(3, 0), exact)
    metadata.force_unfused_topk = unfused
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    q, weights = p.q.flatten(0, 1), p.weights.flatten(0, 1).unsqueeze(-1)
    for rank in range(world_size):
        ranks.rank_in_group = rank
        got = dsa_indexer.get_topk_paged(
            lambda *args: pytest.fail("SGLang scored the rows"),
            indexer(p.index_cache),
            batch,
            0,
            q,
            weights,
            metadata,
        )
    assert len({tuple(part.shape) for part in ranks.sent}) == 1
    monkeypatch.setenv("SGLANG_GLM_DIVIDE_INDEX_SCAN", "off")
    alone = dsa_indexer.get_topk_paged(
        lambda *args: pytest.fail("SGLang scored the rows"),
        indexer(p.index_cache),
        batch,
        0,
        q,
        weights,
        metadata,
    )
    assert torch.equal(got, alone)


@pytest.mark.parametrize(
    ("choice", "world_size", "batch_size", "divided"),
    [("on", 2, 2, True), ("on", 4, 3, False), ("on", 1, 8, False), ("auto", 2, 8, False)],
)
def test_who_divides(
    monkeypatch: pytest.MonkeyPatch, choice: str, world_size: int, batch_size: int, divided: bool
) -> None:
    monkeypatch.setenv("SGLANG_GLM_DIVIDE_INDEX_SCAN", choice)
    ranks = Ranks(world_size)
    monkeypatch.setattr(dsa_indexer, "get_parallel", lambda: SimpleNamespace(attn_tp_group=ranks))
    assert dsa_indexer.dividing_group(batch_size) is (ranks if divided else None)


class Prefill:
    """Two requests, 4 and 3 new rows of 70 and 40 positions, and SGLang's steps around scoring.

    Its queries are the scores themselves, one for each of the 110 concatenated keys.
    """

    rows, padding, topk = 7, 2, 9

    def __init__(self, method: TopkTransformMethod, chunk: int | None) -> None:
        self.chunk = chunk
        lengths = torch.tensor([67, 68, 69, 70, 38, 39, 40], dtype=torch.int32)
        starts = torch.tensor([0] * 4 + [70] * 3, dtype=torch.int32)
        owners = torch.tensor([0] * 4 + [1] * 3, dtype=torch.int32)
        self.metadata = DSAIndexerMetadata(
            attn_metadata=SimpleNamespace(
                dsa_seqlens_expanded=lengths,
                indexer_k_start_end=(starts, starts + lengths),
                token_to_batch_idx=owners,
                cu_seqlens_q=None,
                topk_indices_offset=starts if method is RAGGED else None,
                real_page_table=torch.tensor([[5, 3], [7, 0]], dtype=torch.int32),
            ),
            topk_transform_method=method,
            topk_backend=ExactTopk(),
        )
        self.scores = scores(self.rows + self.padding, 110)[:, None]
        self.weights = torch.zeros(self.rows + self.padding, 1, 1)
        self.batch = SimpleNamespace(seq_lens=torch.tensor([70, 40]))
        self.indexer = SimpleNamespace(index_topk=self.topk)

    def stock(
        self,
        indexer: Any,
        dual_stream: bool,
        batch: Any,
        layer_id: int,
        q: torch.Tensor,
        weights: torch.Tensor,
        metadata: Any,
        result: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `Indexer._get_topk_ragged`, whole or in chunks of rows."""
        starts, _ = metadata.get_indexer_kvcache_range()
        if result is None:
            result = torch.full((len(q), self.topk), -1, dtype=torch.int32)
        if self.chunk is None:
            assert len(metadata.get_seqlens_expanded()) == len(starts) <= len(weights)
            result[: len(starts)] = metadata.topk_transform(
                q[: len(starts), 0], self.topk, ks=starts
            )
            return result
        offsets = metadata.attn_metadata.topk_indices_offset
        for first in range(0, len(starts), self.chunk):
            part = slice(first, first + self.chunk)
            lengths = metadata.get_seqlens_expanded()[part]
            result[first : first + len(lengths)] = metadata.topk_transform(
                q[: len(starts)][part, 0],
                self.topk,
                ks=starts[part],
                cu_seqlens_q=None if offsets is not None else torch.ones_like(lengths),
                ke_offset=lengths,
                batch_idx_list=(
                    None if offsets is not None else metadata.get_token_to_batch_idx()[part]
                ),
                topk_indices_offset_override=None if offsets is None else offsets[part],
            )
        return result

    def select(self) -> torch.Tensor:
        return dsa_indexer.get_topk_ragged(
            self.stock, self.indexer, False, self.batch, 0, self.scores, self.weights, self.metadata
        )


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("method", [RAGGED, PAGED])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_divided_prefill(
    monkeypatch: pytest.MonkeyPatch, world_size: int, method: TopkTransformMethod, chunk: int | None
) -> None:
    prefill = Prefill(method, chunk)
    alone = prefill.select()
    assert (alone[: prefill.rows, 0] >= 0).all() and (alone[prefill.rows :] == -1).all()
    monkeypatch.setenv("SGLANG_GLM_DIVIDE_INDEX_SCAN", "on")
    ranks = Ranks(world_size)
    monkeypatch.setattr(dsa_indexer, "get_parallel", lambda: SimpleNamespace(attn_tp_group=ranks))
    for rank in range(world_size):
        ranks.rank_in_group = rank
        got = prefill.select()
    assert all(len(part) < prefill.rows for part in ranks.sent)
    assert torch.equal(got, alone)


@pytest.mark.parametrize(("world_size", "lengths"), [(1, [70, 40]), (2, [])])
def test_prefill_alone(
    monkeypatch: pytest.MonkeyPatch, world_size: int, lengths: list[int]
) -> None:
    monkeypatch.setenv("SGLANG_GLM_DIVIDE_INDEX_SCAN", "on")
    ranks = Ranks(world_size)
    monkeypatch.setattr(dsa_indexer, "get_parallel", lambda: SimpleNamespace(attn_tp_group=ranks))
    prefill = Prefill(RAGGED, None)
    prefill.batch.seq_lens = torch.tensor(lengths)
    given = torch.zeros(1)
    got = dsa_indexer.get_topk_ragged(
        lambda *args: args[-1], prefill.indexer, True, prefill.batch, 0, given, given,
        prefill.metadata, given,
    )  # fmt: skip
    assert got is given and not ranks.sent
