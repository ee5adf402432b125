"""SGLang's process groups over gloo, with our plugin loaded, on two ranks.

test_gather_scatter     all-gather, reduce-scatter and all-to-all of equal parts
test_integer_sum        integer rows are summed in place, as the gather of token ids does
test_variable_lengths   all_gatherv and reduce_scatterv with 3+1, 0+4 and 5+0 rows, several inputs, given outputs
test_parts_join         partial attention of both ranks, joined, each keeping its heads; base-2 logarithms too
test_wrong_rows         sizes that do not fit are refused on the rank that holds them
test_agreement          equal selections pass; different ones raise on every rank, naming layer, row and place
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

SIZES = ([3, 1], [0, 4], [5, 0])


def _rows(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count * 2).view(count, 2) + 100 * rank).to(dtype)


def _parts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial attention `[3, 4, 8]` and natural log-sum-exps; of token 1 this rank has nothing."""
    rng = torch.Generator().manual_seed(rank)
    out, lse = torch.randn(3, 4, 8, generator=rng), torch.randn(3, 4, generator=rng)
    if rank == 1:
        out[1], lse[1] = 0, float("-inf")
    return out, lse


def _message(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def program(rank: int) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import parallel_state

    from sglang_glm.compat.host.dcp_comm import cp_lse_ag_out_rs_mla
    from sglang_glm.parallel.history_stripes import merge_over_ranks
    from sglang_glm.parallel.index_agreement import check_agreement

    group = parallel_state.GroupCoordinator(
        group_ranks=[[0, 1]],
        local_rank=rank,
        torch_distributed_backend="gloo",
        use_pynccl=False,
        use_mscclpp=False,
        use_custom_allreduce=False,
        use_torch_symm_mem_all_reduce=False,
        use_hpu_communicator=False,
        use_xpu_communicator=False,
    )
    found: dict[str, Any] = {}
    gathered, scattered, exchanged = torch.empty(4, 2), torch.empty(1, 2), torch.empty(2, 2)
    group.all_gather_into_tensor(gathered, _rows(rank, 2))
    group.reduce_scatter_tensor(scattered, _rows(rank, 2))
    group.all_to_all_single(exchanged, _rows(rank, 2))
    found["equal"] = (gathered, scattered, exchanged)

    ids = _rows(rank, 2, torch.int32)
    parallel_state.inplace_all_reduce(ids, group_name=group.unique_name)
    found["ids"] = ids
    found["no_group"] = _message(lambda: parallel_state.inplace_all_reduce(ids, group_name="gone"))

    found["variable"] = []
    for sizes in SIZES:
        own = _rows(rank, sizes[rank])
        several = group.all_gatherv([own, own.int()], sizes=sizes)
        given = torch.full((sum(sizes), 2), torch.nan)
        group.all_gatherv(own, sizes=sizes, output=given)
        kept = torch.full((sizes[rank], 2), torch.nan)
        group.reduce_scatterv(_rows(rank, sum(sizes)), output=kept, sizes=sizes)
        found["variable"].append((several, given, kept))
    found["wrong"] = (
        _message(lambda: group.all_gatherv(_rows(rank, 2), sizes=[3, 3])),
        _message(lambda: group.reduce_scatterv(_rows(rank, 2), sizes=[3, 3])),
    )

    out, lse = _parts(rank)
    found["parts"] = merge_over_ranks(out, lse, group)
    found["parts_base_2"] = cp_lse_ag_out_rs_mla(out, lse / math.log(2), group)

    selection = torch.tensor([[4, 2, -1], [7, 3, 1]], dtype=torch.int32)
    check_agreement(selection, 6, group.device_group)
    selection[1, 2] = rank
    found["disagreement"] = _message(lambda: check_agreement(selection, 6, group.device_group))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(program)


def test_gather_scatter(ranks: list[dict[str, Any]]) -> None:
    both = torch.cat([_rows(0, 2), _rows(1, 2)])
    for rank, found in enumerate(ranks):
        gathered, scattered, exchanged = found["equal"]
        assert torch.equal(gathered, both)
        assert torch.equal(scattered, (_rows(0, 2) + _rows(1, 2))[rank : rank + 1])
        assert torch.equal(exchanged, both[rank::2])


def test_integer_sum(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert torch.equal(found["ids"], _rows(0, 2, torch.int32) + _rows(1, 2, torch.int32))
        assert "'gone'" in found["no_group"]


@pytest.mark.parametrize("index", range(len(SIZES)), ids=[str(s) for s in SIZES])
def test_variable_lengths(ranks: list[dict[str, Any]], index: int) -> None:
    sizes = SIZES[index]
    gathered = torch.cat([_rows(rank, count) for rank, count in enumerate(sizes)])
    summed = (_rows(0, sum(sizes)) + _rows(1, sum(sizes))).split(sizes)
    for rank, found in enumerate(ranks):
        (floats, integers), given, kept = found["variable"][index]
        assert torch.equal(floats, gathered) and torch.equal(given, gathered)
        assert torch.equal(integers, gathered.int()) and integers.dtype == torch.int32
        assert torch.equal(kept, summed[rank])


def test_parts_join(ranks: list[dict[str, Any]]) -> None:
    (out0, lse0), (out1, lse1) = _parts(0), _parts(1)
    weight = torch.sigmoid(lse0 - lse1)[..., None]
    joined = (weight * out0 + (1 - weight) * out1).transpose(0, 1)
    for found, heads in zip(ranks, joined.split(2), strict=True):
        torch.testing.assert_close(found["parts"], heads)
        torch.testing.assert_close(found["parts_base_2"], heads)


def test_wrong_rows(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        gather, scatter = found["wrong"]
        assert f"rank {rank} holds 2 rows, expected 3" in gather
        assert f"rank {rank} holds 2 rows, expected 6" in scatter


def test_agreement(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["disagreement"] == ranks[1]["disagreement"]
    assert "layer 6" in ranks[0]["disagreement"]
    assert "row 1, place 2: 0 on one, 1 on another" in ranks[0]["disagreement"]
