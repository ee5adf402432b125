"""Sparse MLA on the GPU.

| test | catches |
| --- | --- |
| equals fp64 for packed and bf16 rows, holes, poison (T06, T07, T31) | padding in the softmax, wrong rows |
| error at most twice that of torch at bf16 | precision lost on the way |
| every split count agrees | a combination that loses a part |
| row alone equals row in batch with equal splits, twenty repeats equal (T41) | races |
| few heads: every cluster size equals fp64, alone equals in batch, repeats equal | a part lost between blocks |
| union equals sets, verify equals token by token (T41) | a member bit of the wrong token |
| launch bounds (T32) | 16-bit grids |
| graph replay with new data (T20) | values frozen at capture |
"""

import pytest
import torch
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_few_heads_sm90 import CLUSTERS, sparse_mla_few_heads_sm90
from glm_kernels.attention.sparse_mla_sm90 import sparse_mla_sm90
from glm_kernels.attention.sparse_mla_verify import sparse_mla_verify
from glm_kernels.attention.union_slots import union_slots
from glm_kernels.attention.union_slots_ref import union_slots_ref
from glm_kernels.cache.mla_rows import unpack_mla_rows
from glm_kernels.testing.fp64 import sparse_mla_fp64
from glm_kernels.testing.generate import SparseMla, sparse_mla_inputs
from glm_kernels.testing.numeric import assert_attention, assert_bitwise, assert_lse, calc_diff
from glm_kernels.testing.poison import poison_unreferenced_rows
from glm_kernels.testing.shapes import CORNER_MLA, MlaShape

pytestmark = pytest.mark.gpu


def assert_output(out: torch.Tensor, want: torch.Tensor, what: str) -> None:
    # Probabilities carry 8 bits in bf16 and values are of order one: 2**-8 bounds an element.
    assert_attention(out, want, what, atol=2.0**-8, cosine=1e-5)


def assert_sums(lse: torch.Tensor, want: torch.Tensor, what: str) -> None:
    # A score is a sum of 576 products of 11-bit (packed) operands: about 2e-4, at most some 1e-3.
    assert_lse(lse, want, what, atol=2e-3)


def hostile(shape: MlaShape, packed: bool, hole_rate: float, seed: int = 0) -> SparseMla:
    x = sparse_mla_inputs(shape, packed, seed, "cuda", torch.bfloat16, hole_rate)
    x.kv_cache.copy_(poison_unreferenced_rows(x.kv_cache, x.slots))
    return x


@pytest.mark.parametrize("hole_rate", [0.0, 0.4])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize("shape", CORNER_MLA, ids=lambda s: s.name)
def test_equals_fp64(shape: MlaShape, packed: bool, hole_rate: float) -> None:
    x = hostile(shape, packed, hole_rate)
    out, lse = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    want, want_lse = sparse_mla_fp64(x)
    what = f"sparse_mla {shape.name} packed={packed}"
    assert_output(out, want, what)
    assert_sums(lse, want_lse, what)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
def test_no_worse_than_torch_at_bf16(packed: bool) -> None:
    x = hostile(CORNER_MLA[3], packed, 0.0)
    out, _ = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    want, _ = sparse_mla_fp64(x)
    torch_out = torch.empty_like(out)
    for token in range(x.q.shape[0]):
        rows = x.kv_cache[x.slots[token].long(), 0]
        rows = unpack_mla_rows(rows, torch.bfloat16) if packed else rows
        scores = (x.q[token] @ rows.T).float() * x.softmax_scale
        torch_out[token] = scores.softmax(-1).bfloat16() @ rows[:, :512]
    assert calc_diff(out, want) <= 2 * calc_diff(torch_out, want)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 32])
def test_split_counts_agree(splits: int) -> None:
    x = hostile(CORNER_MLA[3], True, 0.3)
    out, lse = sparse_mla_sm90(x.q, x.kv_cache, x.slots, x.softmax_scale, num_splits=splits)
    want, want_lse = sparse_mla_fp64(x)
    assert_output(out, want, f"{splits} splits")
    assert_sums(lse, want_lse, f"{splits} splits")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
def test_rows_do_not_depend_on_their_batch(packed: bool) -> None:
    x = hostile(CORNER_MLA[1], packed, 0.1)
    want, want_lse = sparse_mla_sm90(x.q, x.kv_cache, x.slots, x.softmax_scale, num_splits=4)
    for _ in range(20):
        out, lse = sparse_mla_sm90(x.q, x.kv_cache, x.slots, x.softmax_scale, num_splits=4)
        assert_bitwise(out, want, "repeat")
        assert_bitwise(lse, want_lse, "repeat lse")
    for token in (0, 1, 20, 36):
        one = slice(token, token + 1)
        alone, _ = sparse_mla_sm90(
            x.q[one], x.kv_cache, x.slots[one], x.softmax_scale, num_splits=4
        )
        assert_bitwise(alone, want[one], f"token {token} alone")


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("num_heads", "topk"), [(8, 2048), (8, 17), (3, 513), (1, 1)])
def test_few_heads(num_heads: int, topk: int, cluster: int) -> None:
    shape = MlaShape(name="few", num_tokens=7, num_heads=num_heads, topk=topk, num_slots=9000)
    x = hostile(shape, True, 0.3)

    def attend(some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_mla_few_heads_sm90(
            x.q[some], x.kv_cache, x.slots[some], x.softmax_scale, cluster
        )

    out, lse = attend(slice(None))
    want, want_lse = sparse_mla_fp64(x)
    assert_output(out, want, f"cluster {cluster}")
    assert_sums(lse, want_lse, f"cluster {cluster}")
    for _ in range(20):
        again, again_lse = attend(slice(None))
        assert_bitwise(again, out, "repeat")
        assert_bitwise(again_lse, lse, "repeat lse")
    for token in (0, 1, 6):
        one = slice(token, token + 1)
        assert_bitwise(attend(one)[0], out[one], f"token {token} alone")


@pytest.mark.parametrize("exponent", [-12, 0, 8])
def test_few_heads_take_any_scale(exponent: int) -> None:
    shape = MlaShape(name="few", num_tokens=3, num_heads=8, topk=300, num_slots=900)
    x = hostile(shape, True, 0.0)
    # The fp32 scales of the codes; the scores stay as they are.
    scales = x.kv_cache[..., 512:528].view(torch.float32)
    scales.copy_(torch.where(scales.isfinite(), scales * 2.0**exponent, scales))
    q = x.q.clone()
    q[..., :512] *= 2.0**-exponent
    got, _ = sparse_mla_few_heads_sm90(q, x.kv_cache, x.slots, x.softmax_scale)
    scaled = SparseMla(q=q, kv_cache=x.kv_cache, slots=x.slots, softmax_scale=x.softmax_scale)
    want, _ = sparse_mla_fp64(scaled)
    assert_output(got * 2.0**-exponent, want * 2.0**-exponent, f"scales times 2**{exponent}")


@pytest.mark.parametrize("next_n", [1, 2, 6, 8])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
def test_verify_equals_token_by_token(next_n: int, packed: bool) -> None:
    shape = MlaShape(
        name="verify", num_tokens=5 * next_n, num_heads=8, topk=700, num_slots=9000, shared=next_n
    )
    x = sparse_mla_inputs(shape, packed, 1, "cuda", torch.bfloat16, 0.1, union=1200)
    lists, members, counts = union_slots(x.slots, next_n)
    ref_lists, ref_members, ref_counts = union_slots_ref(x.slots.cpu(), next_n)
    assert_bitwise(counts, ref_counts, "counts")
    for request, count in enumerate(ref_counts.tolist()):
        assert_bitwise(lists[request, :count], ref_lists[request, :count], f"list {request}")
        assert_bitwise(members[request, :count], ref_members[request, :count], f"members {request}")
    x.kv_cache.copy_(poison_unreferenced_rows(x.kv_cache, x.slots))
    out, lse = sparse_mla_verify(x.q, x.kv_cache, lists, members, counts, x.softmax_scale)
    want, want_lse = sparse_mla_fp64(x)
    assert_output(out, want, f"verify {next_n}")
    assert_sums(lse, want_lse, f"verify {next_n}")


@pytest.mark.parametrize("num_tokens", [11_673, 11_674, 65_535])
def test_launch_bounds(num_tokens: int) -> None:
    shape = MlaShape(name="bounds", num_tokens=num_tokens, num_heads=8, topk=64, num_slots=500)
    x = sparse_mla_inputs(
        MlaShape(name="one", num_tokens=1, num_heads=8, topk=64, num_slots=500), True, 0, "cuda"
    )
    q = x.q.bfloat16().expand(shape.num_tokens, -1, -1).contiguous()
    slots = x.slots.expand(shape.num_tokens, -1).contiguous()
    out, _ = sparse_mla(q, x.kv_cache, slots, x.softmax_scale)
    assert_bitwise(out, out[:1].expand_as(out), f"{num_tokens} equal tokens")


def test_graph_replay_with_new_data() -> None:
    x, other = hostile(CORNER_MLA[3], True, 0.2), hostile(CORNER_MLA[3], True, 0.5, seed=9)
    sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    for target, source in ((x.q, other.q), (x.kv_cache, other.kv_cache), (x.slots, other.slots)):
        target.copy_(source)
    graph.replay()
    want, want_lse = sparse_mla_fp64(other)
    assert_output(out, want, "replay")
    assert_sums(lse, want_lse, "replay")
