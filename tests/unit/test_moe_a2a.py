"""The portable all-to-all towards SGLang's MoE layer (T36, T37).

test_scaled_once        SGLang's CUDA runners leave the routed factor to the MoE block, of our backend only
test_nothing_arrived    a rank that receives no rows computes one without experts, and returns none
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput

from sglang_glm.compat import moe_a2a
from sglang_glm.parallel import dispatcher as module
from sglang_glm.parallel.all_to_all import Dispatched, Route


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(moe_ep_group=SimpleNamespace(device_group=None))
    monkeypatch.setattr(module, "get_parallel", lambda: parallel)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("backend", "factor"), [("glm_a2a", None), ("none", 2.5)])
def test_scaled_once(monkeypatch: pytest.MonkeyPatch, backend: str, factor: float | None) -> None:
    monkeypatch.setattr(
        "sglang.srt.layers.moe.utils.get_moe_a2a_backend", lambda: SimpleNamespace(value=backend)
    )
    config = MoeRunnerConfig(num_experts=8, routed_scaling_factor=2.5)
    moe_a2a.create_moe_dispatcher(lambda config, quant_method: None, config, None)
    assert config.routed_scaling_factor == factor


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("received", [0, 3])
def test_nothing_arrived(monkeypatch: pytest.MonkeyPatch, received: int) -> None:
    route = Route(
        num_tokens=0,
        token_of_sent_row=torch.empty(0, dtype=torch.int64),
        sent_counts=(0, 0),
        received_counts=(0, received),
    )
    arrived = Dispatched(
        hidden_states=torch.ones(received, 16, dtype=torch.bfloat16),
        topk_ids=torch.zeros(received, 2, dtype=torch.int32),
        topk_weights=torch.ones(received, 2),
    )
    returned: list[torch.Tensor] = []
    monkeypatch.setattr(module, "dispatch", lambda *args, **kwargs: (arrived, route))
    monkeypatch.setattr(module, "combine", lambda rows, *args, **kwargs: returned.append(rows))
    exchange = module.GlmDsaAllToAllDispatcher(MoeRunnerConfig(num_experts=8))
    nothing: Any = StandardTopKOutput(
        topk_weights=torch.empty(0, 2), topk_ids=torch.empty(0, 2), router_logits=None
    )
    computed = exchange.dispatch(torch.empty(0, 16), nothing)
    assert computed.hidden_states.shape == (max(1, received), 16)
    assert computed.topk_output.topk_ids.tolist() == ([[0, 0]] * received or [[-1, -1]])
    exchange.combine(SimpleNamespace(hidden_states=computed.hidden_states))
    assert returned[0].shape == (received, 16)
