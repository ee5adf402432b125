"""Every part of the measurement passes its own checks on all GPUs of the machine.

| part | checks |
| --- | --- |
| portable | rows, ids and weights against loops; sums; a rank without tokens (T36) |
| deepep_normal | the same, and FP8 rows within e4m3's rounding |
| deepep_low_latency | every expert's rows against their sources, counts, sums, an idle rank |
| index_scan | the divided scan selects what the whole one selects, at 32K to 1M (T41) |
| collectives | they run |
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.parallel.measure import PARTS, run_part

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


@pytest.mark.parametrize("part", PARTS)
def test_part(part: str, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    assert gpus > 1, f"{gpus} GPU, expected several"
    args = Namespace(gpus=gpus, device="cuda", commit="test", logs=tmp_path)
    assert run_part(part, args, 60) == "ok"
