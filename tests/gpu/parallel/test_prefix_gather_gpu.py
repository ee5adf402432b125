"""Pages of a prefix between GPUs over NCCL: the code of `distributed/test_prefix_gather.py`.

test_bytes          every page arrives as its owner has it, beside collectives of the group and without
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.prefix_gathers import count_wrong
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


@pytest.mark.parametrize("collectives", [False, True])
def test_bytes(collectives: bool) -> None:
    gpus = min(torch.cuda.device_count(), 4)
    assert gpus > 1, f"{gpus} GPU, expected several"
    program = partial(count_wrong, gpus, "cuda", collectives)
    for compared, wrong in run_ranks(program, gpus, "nccl"):
        assert compared > 100 and wrong == 0
