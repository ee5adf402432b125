"""Prefill/decode disaggregation (`--disaggregation-mode`) on the CPU: flags at start."""

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_glm.compat.host.refusals import refuse

_BACKENDS = ("nixl", "mooncake_tcp")


def handle_pd_disaggregation(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what needs a device, and run prefill and scheduling in one stream.

    Raises:
        ValueError: names the flag, the reason and what to do.
    """
    view = resolving_view(server_args)
    if view.disaggregation_mode != "null":
        refuse(_refusals(view))
        # There are no streams to overlap, and cached prefixes would wait for an event of CUDA.
        declare_resolution(server_args, "sglang_glm", disable_overlap_schedule=True)
    previous(server_args)


def _refusals(view: Any) -> Iterator[tuple[str, bool, str]]:
    backend = view.disaggregation_transfer_backend
    yield (
        f"--disaggregation-transfer-backend {backend}",
        backend not in _BACKENDS,
        f"it moves memory of a device or needs RDMA; use one of {', '.join(_BACKENDS)}",
    )
    yield (
        "--disaggregation-enable-kv-checksum",
        view.disaggregation_enable_kv_checksum,
        "the sums are computed by a CUDA kernel; leave the flag out",
    )
    yield (
        f"--disaggregation-mode {view.disaggregation_mode} with --dcp-size {view.dcp_size}",
        view.dcp_size > 1,
        "stripes of latents are packed for the other side by a CUDA kernel; leave one of them out",
    )
