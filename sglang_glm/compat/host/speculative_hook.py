"""Draft settings that the CPU cannot serve are refused at start, in one sentence each."""

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

from sglang_glm.config import is_glm_moe_dsa

_SPARSE = "dsa"


def handle_speculative_decoding(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let SGLang fill the draft settings in, then check them for a GLM model.

    Raises:
        ValueError: names the flag, the reason and what to do.
    """
    previous(server_args)
    view = resolved_view(server_args)
    architectures = model_config_of(view).hf_config.architectures
    if view.speculative_algorithm is None or not is_glm_moe_dsa(architectures):
        return
    for flag, reason in _refusals(view):
        raise ValueError(
            f"{flag} cannot be served with drafts for glm_moe_dsa on the CPU: {reason}"
        )


def _refusals(view: Any) -> Iterator[tuple[str, str]]:
    backend_flags = (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    )
    for field in backend_flags:
        backend = getattr(view, field)
        if backend not in (None, _SPARSE):
            yield (
                f"--{field.replace('_', '-')} {backend}",
                "a dense backend selects no positions, and drafts share a selection "
                f"(index_share_for_mtp_iteration); use {_SPARSE} or leave the flag out",
            )
    if view.speculative_eagle_topk != 1:
        yield (
            f"--speculative-eagle-topk {view.speculative_eagle_topk}",
            "the branches of a tree have no common selection; use 1",
        )
    if view.speculative_use_rejection_sampling:
        yield (
            "--speculative-use-rejection-sampling",
            "its kernel needs a GPU; without the flag the output has the same distribution",
        )
    if view.enable_multi_layer_eagle:
        yield (
            "--enable-multi-layer-eagle",
            "a GLM checkpoint has one MTP layer, which drafts every step; leave the flag out",
        )
