"""The portable all-to-all as one of SGLang's MoE dispatchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel

from sglang_glm.parallel.all_to_all import Route, combine, dispatch

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput


class GlmDsaAllToAllDispatcher(BaseDispatcher):
    """Hands an ordinary fused-MoE layer the tokens of all ranks that chose its experts.

    The combine is complete: no sum over ranks is owed afterwards.
    """

    def __init__(self, moe_runner_config: MoeRunnerConfig) -> None:
        super().__init__()
        self.runner_backend = moe_runner_config.runner_backend
        self.num_experts = moe_runner_config.num_experts
        self._group = get_parallel().moe_ep_group.device_group
        self._route: Route | None = None

    def dispatch(
        self, hidden_states: torch.Tensor, topk_output: StandardTopKOutput
    ) -> StandardDispatchOutput:
        """Send `[num_tokens, hidden]` out; returns what arrived, with local expert ids."""
        arrived, self._route = dispatch(
            hidden_states,
            topk_output.topk_ids,
            topk_output.topk_weights,
            num_experts=self.num_experts,
            group=self._group,
        )
        arrived = arrived.at_least_one_row()
        return StandardDispatchOutput(
            hidden_states=arrived.hidden_states,
            hidden_states_scale=None,
            topk_output=StandardTopKOutput(
                topk_weights=arrived.topk_weights,
                topk_ids=arrived.topk_ids,
                router_logits=topk_output.router_logits,
            ),
        )

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        """Bring the experts' rows back; `[num_tokens, hidden]` of the tokens that were sent out.

        Raises:
            RuntimeError: nothing was dispatched.
        """
        route, self._route = self._route, None
        if route is None:
            raise RuntimeError(
                "combine: no dispatch preceded it, and each dispatch is combined once"
            )
        arrived = combine_input.hidden_states[: sum(route.received_counts)]
        return combine(arrived, route, group=self._group)
