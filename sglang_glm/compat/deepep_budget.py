"""DeepEP's low-latency buffers are checked at start, not at graph capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_glm.planning.flags import DEEPEP_MAX_TOKENS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

#: The most that the kernels take.
MAX_CAPACITY = 1024


def refuse_small_buffers(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run SGLang's last check, which knows the second version of DeepEP only; then ours.

    Raises:
        ValueError: a decode batch does not fit; names the figure to set.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs

    previous(server_args)
    check_budget(
        resolved_view(server_args), envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
    )


def decode_rows_per_rank(view: Any) -> int:
    """Most rows that one rank dispatches in a decode or verify step.

    Args:
        view: Resolved arguments. Without `--max-running-requests` the largest captured batch
            counts: SGLang sizes the rest from the cache later.
    """
    if view.max_running_requests is not None:
        requests = max(1, view.max_running_requests // view.attn_dp_size)
    else:
        requests = (view.cuda_graph_config and view.cuda_graph_config.decode.max_bs) or 0
    rows = requests * (view.speculative_num_draft_tokens or 1)
    attn_tp_size = view.tp_size // view.attn_dp_size
    # Ranks of one attention group each dispatch a share of its rows.
    return -(-rows // attn_tp_size)


def check_budget(view: Any, capacity: int) -> None:
    """Compare decode batches with DeepEP's low-latency capacity.

    Args:
        view: Resolved arguments.
        capacity: Rows that a rank's buffers hold.

    Raises:
        ValueError: they hold too few, or more than the kernels take.
    """
    if view.moe_a2a_backend != "deepep" or view.deepep_mode == "normal":
        return
    if capacity > MAX_CAPACITY:
        raise ValueError(
            f"{DEEPEP_MAX_TOKENS_VARIABLE}={capacity}: DeepEP takes at most {MAX_CAPACITY}"
        )
    if view.disaggregation_mode == "prefill":
        return
    rows = decode_rows_per_rank(view)
    if rows > MAX_CAPACITY:
        raise ValueError(
            f"a decode step dispatches up to {rows} rows a rank, and DeepEP's low-latency mode takes "
            f"{MAX_CAPACITY}; lower --max-running-requests or choose --deepep-mode normal"
        )
    if rows > capacity:
        raise ValueError(
            f"{DEEPEP_MAX_TOKENS_VARIABLE} is {capacity}, and a decode step dispatches up to {rows} rows a rank; "
            f"set it to {rows} or lower --max-running-requests"
        )
