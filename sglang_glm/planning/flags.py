"""Server flags that make a launch match its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_glm.planning.plan import Plan

DEEPEP_MAX_TOKENS_VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
DEEPEP_MAX_TOKENS_DEFAULT = 128


def max_running_requests(plan: Plan) -> int:
    """Requests to admit: as asked, at most as fit, the same number in every attention group."""
    groups = plan.setup.layout.attn_dp_size
    admitted = min(plan.workload.concurrency, plan.requests_that_fit())
    return max(groups, admitted // groups * groups)


def decode_rows_per_rank(plan: Plan) -> int:
    """Rows of one rank's largest decode or verify batch, which the dispatch buffers must hold."""
    layout, mtp = plan.setup.layout, plan.workload.mtp
    requests = -(-max_running_requests(plan) // layout.attn_dp_size)
    rows = requests * (mtp.num_draft_tokens if mtp is not None else 1)
    return -(-rows // layout.attn_tp_size)


def environment(plan: Plan) -> dict[str, str]:
    """Variables to set beside the flags."""
    if plan.setup.layout.moe_dispatch != "all_to_all":
        return {}
    rows = decode_rows_per_rank(plan)
    if rows <= DEEPEP_MAX_TOKENS_DEFAULT:
        return {}
    # Powers of two: the buffers are aligned, and a later raise of the batch keeps the value.
    return {DEEPEP_MAX_TOKENS_VARIABLE: str(1 << (rows - 1).bit_length())}


def launch_flags(plan: Plan, model: str) -> list[str]:
    """Arguments of `python -m sglang.launch_server`, one element per word.

    Args:
        plan: A plan in which at least one request fits.
        model: Model name or path.

    Raises:
        ValueError: If not one request of the workload's length fits, or for decode context
            parallelism on a GPU where SGLang 0.5.23 cannot run it.
    """
    if plan.setup.layout.dcp_size > 1 and plan.gpu.architecture == "hopper":
        raise ValueError(
            f"plan: dcp_size is {plan.setup.layout.dcp_size} on {plan.gpu.name}, where SGLang "
            "0.5.23 cannot start it: its decode context parallelism for sparse attention runs on "
            "TRT-LLM kernels, which need Blackwell; the memory figures show what it would hold"
        )
    if plan.requests_that_fit() == 0:
        raise ValueError(
            f"plan: no request of {plan.workload.context_tokens:,} tokens fits, each attention "
            f"group caches {plan.memory.tokens_per_group:,}; shorten the context, lower "
            "--chunked-prefill-size, or spread the cache with a larger tp_size / attn_dp_size and "
            "--dcp-size"
        )
    layout, workload = plan.setup.layout, plan.workload
    flags = ["--model-path", model, "--tp-size", str(layout.tp_size)]
    if layout.num_nodes > 1:
        flags += ["--nnodes", str(layout.num_nodes), "--node-rank", "0"]
        flags += ["--dist-init-addr", "HEAD_NODE:20000"]
    for flag, size in (
        ("--attn-dp-size", layout.attn_dp_size),
        ("--ep-size", layout.ep_size),
        ("--dcp-size", layout.dcp_size),
    ):
        if size > 1:
            flags += [flag, str(size)]
    if layout.moe_dispatch == "all_to_all":
        flags += ["--moe-a2a-backend", "deepep"]
    if layout.dense_mlp_replicated:
        flags += ["--moe-dense-tp-size", "1"]
    if layout.lm_head_per_attn_group:
        flags += ["--enable-dp-lm-head"]
    if plan.setup.precision == "fp8" and plan.setup.config.quant_method is None:
        flags += ["--quantization", "fp8"]
    kv_dtype = "bfloat16" if plan.setup.kv_dtype == "bf16" else "fp8_e4m3"
    requests = max_running_requests(plan)
    for flag, value in (
        ("--kv-cache-dtype", kv_dtype),
        ("--context-length", workload.context_tokens),
        ("--max-running-requests", requests),
        ("--cuda-graph-max-bs-decode", -(-requests // layout.attn_dp_size)),
        ("--chunked-prefill-size", workload.chunk_tokens),
        ("--mem-fraction-static", plan.memory.mem_fraction_static),
    ):
        flags += [flag, str(value)]
    if workload.mtp is not None:
        for flag, value in (
            ("--speculative-algorithm", "EAGLE"),
            ("--speculative-num-steps", workload.mtp.num_steps),
            ("--speculative-eagle-topk", 1),
            ("--speculative-num-draft-tokens", workload.mtp.num_draft_tokens),
        ):
            flags += [flag, str(value)]
    return flags
