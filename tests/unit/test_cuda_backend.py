"""The CUDA backend in its torch forms: which form serves, what it reads, what it leaves to SGLang.

test_rows_equal_reference   decode, verify and prefill rows, packed and BF16, equal sparse MLA
test_one_plan_a_selection   layers that share a selection share the union of its rows
test_positions              an unfused selection goes through the page table
test_padded_rows            rows beyond the selection give zeros
test_left_to_sglang         batches that ours does not win, dense prefill, HiSparse
test_decides_for_few_heads  the automatic choice takes ours in decode and verify
test_draft_steps*           a draft step attends to itself and to the drafts before it, with our
                            kernels and with stock ones
test_selections_left_alone  no draft step, or a selection that drafted slots cannot join
"""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glm_kernels.attention.sparse_mla import sparse_mla
from sglang.srt.layers.attention import dsa_backend as stock
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_glm.compat.cuda import dsa_backend
from tests.support.cuda_backend import SCALE, backend, call, selections

NUM_SLOTS, TOPK = 640, 8


def queries(rows: int, heads: int) -> torch.Tensor:
    return torch.randn(rows, heads, 576, generator=torch.Generator().manual_seed(1)).bfloat16()


def reference(made: Any, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return sparse_mla(q, made.token_to_kv_pool.rows, slots, SCALE)[0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("mode", "next_n", "requests"),
    [
        (ForwardMode.DECODE, 1, 5),
        (ForwardMode.TARGET_VERIFY, 3, 2),
        (ForwardMode.TARGET_VERIFY, 3, 16),
        (ForwardMode.DRAFT_EXTEND_V2, 3, 16),
        (ForwardMode.EXTEND, 1, 7),
    ],
)
def test_rows_equal_reference(packed: bool, mode: ForwardMode, next_n: int, requests: int) -> None:
    rows, heads = requests * next_n, 2
    made = backend(heads=heads, packed=packed, next_n=next_n)
    q, slots = queries(rows, heads), selections(rows, TOPK, NUM_SLOTS)
    new = torch.arange(rows) + 100
    k, k_rope = torch.randn(rows, 1, 512).bfloat16(), torch.randn(rows, 1, 64).bfloat16()
    out = call(made, mode, q, slots, k=k, k_rope=k_rope, out_cache_loc=new)
    assert made.forward_metadata is None  # nothing of SGLang's plan is read
    torch.testing.assert_close(out, reference(made, q, slots), atol=2e-2, rtol=2e-2)
    rope = made.token_to_kv_pool.rows[new, 0, -128 if packed else -64 :]
    stored = rope.contiguous().view(torch.bfloat16)
    assert torch.equal(stored, k_rope[:, 0]), "new rows are in the cache"


def test_one_plan_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(heads=2, next_n=3)
    plans = []
    union = dsa_backend.union_slots
    monkeypatch.setattr(
        dsa_backend, "union_slots", lambda *args: (plans.append(args), union(*args))[1]
    )
    q, slots = queries(48, 2), selections(48, TOPK, NUM_SLOTS)
    for _ in range(3):
        call(made, ForwardMode.TARGET_VERIFY, q, slots)
    assert len(plans) == 1
    call(made, ForwardMode.TARGET_VERIFY, q, slots.clone())
    assert len(plans) == 2


def test_positions() -> None:
    made = backend(heads=2, use_fused_topk=False)
    table = torch.tensor([[3, 1], [7, 2], [0, 9]], dtype=torch.int32)
    made.forward_metadata = SimpleNamespace(real_page_table=table, token_to_batch_idx=None)
    positions = torch.tensor([[0, 70, -1], [127, 64, 63], [5, -1, -1]], dtype=torch.int32)
    slots = torch.tensor([[192, 70, -1], [191, 128, 511], [5, -1, -1]], dtype=torch.int32)
    q = queries(3, 2)
    out = call(made, ForwardMode.DECODE, q, positions)
    torch.testing.assert_close(out, reference(made, q, slots))
    made.forward_metadata.token_to_batch_idx = torch.tensor([0, 0, 2], dtype=torch.int32)
    slots[1] = torch.tensor([64 + 63, 64, 192 + 63])
    out = call(made, ForwardMode.EXTEND, q, positions)
    torch.testing.assert_close(out, reference(made, q, slots))


def test_padded_rows() -> None:
    made = backend(heads=2)
    q, slots = queries(6, 2), selections(4, TOPK, NUM_SLOTS)
    out = call(made, ForwardMode.DECODE, q, slots)
    torch.testing.assert_close(out[:4], reference(made, q[:4], slots))
    assert (out[4:] == 0).all()


@pytest.mark.parametrize(
    ("fields", "mode", "rows"),
    [
        ({"decides": True, "impl": "flashmla_kv", "heads": 64}, ForwardMode.DECODE, 193),
        ({"decides": False, "impl": "flashmla_kv", "heads": 8}, ForwardMode.DECODE, 8),
        ({"decides": True, "impl": "flashmla_kv", "heads": 8}, ForwardMode.EXTEND, 8),
        ({"heads": 8, "use_mha": True}, ForwardMode.EXTEND, 8),
        ({"heads": 8, "hisparse_coordinator": object()}, ForwardMode.DECODE, 8),
        ({"heads": 8, "dcp_size": 2}, ForwardMode.DECODE, 8),
    ],
)
def test_left_to_sglang(
    fields: dict, mode: ForwardMode, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stock_forward(self: Any, *args: Any, **kwargs: Any) -> str:
        return "stock"

    base = dsa_backend.GlmDsaCudaAttnBackend.__mro__[1]
    assert base.__module__ == stock.__name__
    monkeypatch.setattr(base, "forward_decode", stock_forward)
    monkeypatch.setattr(base, "forward_extend", stock_forward)
    made = backend(**fields)
    q = queries(rows, fields["heads"])
    assert call(made, mode, q, selections(rows, TOPK, NUM_SLOTS)) == "stock"


def test_decides_for_few_heads() -> None:
    made = backend(heads=8, decides=True, impl="flashmla_kv", next_n=6)
    q, slots = queries(12, 8), selections(12, TOPK, NUM_SLOTS)
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        torch.testing.assert_close(call(made, mode, q, slots), reference(made, q, slots))


def drafted_batch(made: Any, step: int) -> tuple[Any, torch.Tensor, torch.Tensor, list[int]]:
    """Requests around index_topk in a draft step: their batch, selections, what it sees, how much."""
    lengths, requests = [3, TOPK - 1, TOPK, 40], [3, 0, 2, 1]
    slots = torch.full((4, TOPK), -1, dtype=torch.int32)
    seen, counts = slots.clone(), []
    for row, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        table = made.req_to_token[request]
        chosen = table[:length].flip(0)[:TOPK]
        slots[row, : len(chosen)] = chosen
        drafted = table[length : length + step + 1]
        entries = torch.cat([chosen[: TOPK - step - 1], drafted])
        seen[row, : len(entries)] = entries
        counts.append(len(entries))
    batch = SimpleNamespace(seq_lens=torch.tensor(lengths), req_pool_indices=torch.tensor(requests))
    return batch, slots, seen, counts


@pytest.mark.parametrize("step", [0, 1, 4])
def test_draft_steps(step: int) -> None:
    made = backend(heads=2, speculative_num_steps=5, speculative_step_id=step)
    batch, slots, seen, _ = drafted_batch(made, step)
    q = queries(4, 2)
    out = call(made, ForwardMode.DECODE, q, slots, **vars(batch))
    torch.testing.assert_close(out, reference(made, q, seen))


@dataclasses.dataclass(frozen=True)
class Planned:
    """The fields of stock metadata that count entries."""

    dsa_cache_seqlens_int32: torch.Tensor
    dsa_cu_seqlens_k: torch.Tensor


@pytest.mark.parametrize("impl", ["fa3", "flashmla_sparse", "flashmla_kv"])
def test_draft_steps_of_stock_kernels(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries lie without a gap, and kernels that read a count are told of the drafted ones."""
    step = 2
    planned = Planned(torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    made = backend(
        heads=2,
        packed=False,
        impl=impl,
        speculative_num_steps=5,
        speculative_step_id=step,
        forward_metadata=planned,
    )
    batch, slots, seen, counts = drafted_batch(made, step)

    def stock_decode(self: Any, *args: Any, topk_indices: torch.Tensor, **kwargs: Any) -> Any:
        return topk_indices, self.forward_metadata

    base = dsa_backend.GlmDsaCudaAttnBackend.__mro__[1]
    monkeypatch.setattr(base, "forward_decode", stock_decode)
    entries, told = call(made, ForwardMode.DECODE, queries(4, 2), slots, **vars(batch))
    assert torch.equal(entries, seen)
    assert made.forward_metadata is planned
    if impl == "flashmla_kv":
        assert told is planned
    else:
        assert told.dsa_cache_seqlens_int32.tolist() == counts
        assert told.dsa_cu_seqlens_k.tolist() == [0, *itertools.accumulate(counts)]


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"speculative_num_steps": 0}, 2),
        ({"topk": 4}, 2),
        ({"dsa_index_kpool": 2}, 2),
        ({"hisparse_coordinator": object()}, 2),
        ({"use_fused_topk": False}, 2),  # positions, and the page table ends before the drafts
        ({}, 3),  # padded to the ranks of a group
    ],
)
def test_selections_left_alone(fields: dict, rows: int) -> None:
    made = backend(heads=2, speculative_num_steps=3, speculative_step_id=1)
    for name, value in fields.items():
        setattr(made, name, value)
    batch = SimpleNamespace(seq_lens=torch.tensor([5, 40]), req_pool_indices=torch.tensor([3, 0]))
    slots = selections(rows, TOPK, NUM_SLOTS)
    assert made._see_drafts(slots, batch) is slots
