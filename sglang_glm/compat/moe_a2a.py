"""The portable all-to-all among SGLang's MoE all-to-all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_glm.parallel.names import ALL_TO_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher


def add_backend() -> None:
    """Let `MoeA2ABackend` know the name.

    SGLang asks a backend by name for what are properties: a model builds a replicated shared expert,
    sends its own tokens only and owes no sum afterwards when `is_flashinfer()`. Ours has the same
    properties, so it answers yes there; its dispatcher is chosen by identity before that is asked.
    """
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    if ALL_TO_ALL in MoeA2ABackend._value2member_map_:
        return
    member = object.__new__(MoeA2ABackend)
    member._name_, member._value_ = ALL_TO_ALL.upper(), ALL_TO_ALL
    member.is_flashinfer = lambda: True
    MoeA2ABackend._value2member_map_[ALL_TO_ALL] = member


def check_backend() -> str | None:
    """None when SGLang resolves the name to a backend with the properties that ours has."""
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    member = MoeA2ABackend(ALL_TO_ALL)
    has_properties = (
        member.is_flashinfer() and not member.is_none() and not MoeA2ABackend.NONE.is_flashinfer()
    )
    return None if has_properties else f"MoeA2ABackend({ALL_TO_ALL!r}) is {member!r}"


def create_moe_dispatcher(
    original: Callable[..., BaseDispatcher], moe_runner_config: MoeRunnerConfig, quant_method: Any
) -> BaseDispatcher:
    """AROUND hook: our dispatcher where our backend is in use, otherwise SGLang's choice."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    if get_moe_a2a_backend().value != ALL_TO_ALL:
        return original(moe_runner_config, quant_method=quant_method)
    from sglang_glm.parallel.dispatcher import GlmDsaAllToAllDispatcher

    # The MoE block scales the routed sum of every all-to-all. SGLang's CUDA runners would too, from
    # the config that they share with the dispatcher.
    moe_runner_config.routed_scaling_factor = None
    return GlmDsaAllToAllDispatcher(moe_runner_config)


def handle_a2a_moe(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Give every rank experts of its own, as every all-to-all of SGLang does, and keep out of graphs."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    previous(server_args)
    view = resolved_view(server_args)
    if view.moe_a2a_backend != ALL_TO_ALL:
        return
    graphs = view.cuda_graph_config
    for phase in (Phase.PREFILL, Phase.DECODE):
        # Row counts pass through the host in each layer.
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    declare_resolution(
        server_args,
        "sglang_glm",
        ep_size=view.tp_size,
        disable_shared_experts_fusion=True,
        cuda_graph_config=graphs,
    )
