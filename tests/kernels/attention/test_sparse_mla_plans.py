"""Blocks a token for the sparse MLA kernels.

| test | catches |
| --- | --- |
| few tokens are spread, many are not | a plan that leaves the GPU idle, or splits for nothing |
"""

import pytest
from glm_kernels.attention.sparse_mla_few_heads_sm90 import plan_cluster


# The quickest of the measured sizes (H200, 132 multiprocessors).
@pytest.mark.parametrize(("num_tokens", "cluster"), [(1, 8), (8, 8), (32, 4), (192, 1), (8192, 1)])
def test_cluster(num_tokens: int, cluster: int) -> None:
    assert plan_cluster(num_tokens, 2048, 132) == cluster


def test_a_short_list_is_not_spread() -> None:
    assert plan_cluster(1, 17, 132) == 1
