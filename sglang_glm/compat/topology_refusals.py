"""Divisions over ranks that cannot be served are refused at start, in one sentence each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
from sglang.srt.environ import envs

from sglang_glm.config import is_glm_moe_dsa
from sglang_glm.parallel.plan import ParallelPlan
from sglang_glm.parallel.stages import PARTITION_VARIABLE, stage_layers
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.platform import has_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_glm.config import GlmDsaConfig

PP_SPEC_VARIABLE = "SGLANG_ENABLE_PP_SPEC"


def check_topology(view: Any, facts: GlmDsaConfig) -> None:
    """Refuse sizes and mixes that SGLang would stop at later, or serve wrongly.

    Raises:
        ValueError: names the flag and what to choose.
    """
    check_context_parallel(view)
    check_groups(view, facts)
    check_stages(view, facts)


def check_groups(view: Any, facts: GlmDsaConfig) -> None:
    """Refuse sizes of the groups within a stage that do not divide each other or the model."""
    if view.attn_cp_size > 1 or view.moe_dp_size > 1:
        return  # SGLang divides heads and experts differently then, and checks that itself
    all_to_all = view.moe_a2a_backend != "none"
    layout = ParallelLayout(
        tp_size=view.tp_size,
        attn_dp_size=view.attn_dp_size,
        # Left out with an all-to-all, it means all ranks.
        ep_size=view.tp_size if all_to_all and view.ep_size == 1 else view.ep_size,
        dcp_size=view.dcp_size,
        moe_dispatch="all_to_all" if all_to_all else "none",
        dense_mlp_replicated=view.moe_dense_tp_size == 1,
        lm_head_per_attn_group=view.enable_dp_lm_head,
        # How ranks lie on machines is SGLang's to check.
        gpus_per_node=view.tp_size,
    )
    ParallelPlan(config=facts, layout=layout)


def check_stages(view: Any, facts: GlmDsaConfig) -> None:
    """Refuse pipeline stages without layers, and drafts that the pipeline does not carry."""
    if view.pp_size == 1:
        return
    stage_layers(facts.num_hidden_layers, view.pp_size, os.environ.get(PARTITION_VARIABLE))
    if view.speculative_algorithm is None or view.disaggregation_mode == "prefill":
        return
    flags = f"--speculative-algorithm {view.speculative_algorithm} with --pp-size {view.pp_size}"
    if not envs.SGLANG_ENABLE_PP_SPEC.get():
        raise ValueError(
            f"{flags}: SGLang relays drafts between stages only with {PP_SPEC_VARIABLE}=1; set it, or "
            "leave the drafts out"
        )
    if view.attn_dp_size > 1:
        raise ValueError(
            f"{flags} and --attn-dp-size {view.attn_dp_size}: every stage rebuilds the drafts of one "
            "batch, and attention data parallelism has one a rank; leave out one of the three"
        )


def check_context_parallel(view: Any) -> None:
    """Refuse forms of context parallelism that the CPU has no exchange or plan for."""
    if has_accelerator():
        return
    if view.dcp_size > 1 and view.dcp_comm_backend not in (None, "ag_rs"):
        raise ValueError(
            f"--dcp-comm-backend {view.dcp_comm_backend}: on the CPU parts of a history are joined "
            "by ag_rs; leave the flag out"
        )
    if not view.enable_prefill_cp:
        return
    if view.cp_strategy != "interleave":
        raise ValueError(
            f"--cp-strategy {view.cp_strategy} with --enable-prefill-cp: on the CPU ranks take rows in "
            "turn; choose --cp-strategy interleave"
        )
    if view.speculative_algorithm is not None:
        raise ValueError(
            f"--speculative-algorithm {view.speculative_algorithm} with --enable-prefill-cp: the draft's "
            "rows are not divided on the CPU; leave one of them out"
        )


def refuse_unread_stripes(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run SGLang's last check, then ours of what reads a history in stripes on CUDA.

    Raises:
        ValueError: names the backend that cannot, and the one that can.
    """
    previous(server_args)
    view = resolved_view(server_args)
    if is_glm_moe_dsa(model_config_of(view).hf_config.architectures):
        check_stripe_backends(view)


def check_stripe_backends(view: Any) -> None:
    """Refuse decode context parallelism for kernels that return no log-sum-exp to join parts by.

    Args:
        view: Resolved arguments: which backend serves depends on the GPU where no flag names one.
    """
    if view.dcp_size == 1:
        return
    for phase in ("prefill", "decode"):
        name = getattr(view, f"dsa_{phase}_backend")
        if name != "trtllm":
            raise ValueError(
                f"--dcp-size {view.dcp_size} with --dsa-{phase}-backend {name}: only trtllm, which needs "
                "Blackwell, attends to a part of a history; choose it for both phases or leave "
                "--dcp-size out"
            )
