"""DeepEP's buffer limit is met at start (T36): decode rows of a rank against the capacity.

test_rows       requests per attention group, draft tokens, shares of a group; without a limit the graph's
test_refused    one row too many, more than the kernels take, a capacity beyond them: the figure to set
test_accepted   exactly full; the modes and backends that have no such buffer
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_glm.compat.deepep_budget import check_budget, decode_rows_per_rank


def view(**changes: object) -> SimpleNamespace:
    fields = {
        "moe_a2a_backend": "deepep",
        "deepep_mode": "auto",
        "disaggregation_mode": "null",
        "max_running_requests": 1024,
        "attn_dp_size": 8,
        "tp_size": 8,
        "speculative_num_draft_tokens": None,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(max_bs=160)),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 128),
        ({"speculative_num_draft_tokens": 6}, 768),
        ({"attn_dp_size": 4}, 128),
        ({"attn_dp_size": 4, "max_running_requests": 12}, 2),
        ({"attn_dp_size": 1, "max_running_requests": 9}, 2),
        ({"max_running_requests": 3}, 1),
        ({"max_running_requests": None}, 160),
        ({"max_running_requests": None, "cuda_graph_config": None}, 0),
    ],
)
def test_rows(changes: dict, rows: int) -> None:
    assert decode_rows_per_rank(view(**changes)) == rows


@pytest.mark.parametrize(
    ("changes", "capacity", "message"),
    [
        ({}, 127, "set it to 128"),
        ({"speculative_num_draft_tokens": 6}, 128, "set it to 768"),
        ({"max_running_requests": 8 * 1025}, 1024, "dispatches up to 1025 rows a rank"),
        ({}, 2048, "takes at most 1024"),
    ],
)
def test_refused(changes: dict, capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_budget(view(**changes), capacity)


@pytest.mark.parametrize(
    ("changes", "capacity"),
    [
        ({}, 128),
        ({"deepep_mode": "normal"}, 1),
        ({"moe_a2a_backend": "none"}, 1),
        ({"moe_a2a_backend": "glm_a2a"}, 1),
        ({"disaggregation_mode": "prefill"}, 1),
    ],
)
def test_accepted(changes: dict, capacity: int) -> None:
    check_budget(view(**changes), capacity)
