"""What cannot be served for `glm_moe_dsa` is refused at start, in one sentence each."""

import json
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from transformers import PretrainedConfig

from sglang_glm.config import ARCHITECTURES, GlmDsaConfig

#: Quantisation methods of a checkpoint that this model is served with.
QUANTIZATIONS = (None, "fp8")


def refuse_unserved(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the config and the flags of a GLM model before SGLang adjusts anything for it.

    Raises:
        ValueError: names the field or the flag, and what to do.
    """
    view = resolving_view(server_args)
    architectures = model_config_of(view).hf_config.architectures or []
    if any(name in ARCHITECTURES for name in architectures):
        check_config(view)
        check_flags(view)
    previous(server_args)


def check_config(view: Any) -> None:
    """Check the model's config.json as it is written: transformers fills in fields that lack.

    Raises:
        ValueError: names the field.
    """
    written, _ = PretrainedConfig.get_config_dict(view.model_path, revision=view.revision)
    facts = GlmDsaConfig.from_hf({**written, **_overrides(view)})
    if facts.quant_method not in QUANTIZATIONS:
        raise ValueError(
            f"quantization_config.quant_method is {facts.quant_method!r}: glm_moe_dsa is served from BF16 "
            "and FP8 (128x128 blocks) checkpoints"
        )


def check_flags(view: Any) -> None:
    """Refuse flags that the sparse path would ignore or break on.

    Raises:
        ValueError: names the flag and the reason.
    """
    for flag, is_set, reason in _flag_refusals(view):
        if is_set:
            raise ValueError(f"{flag} is not served for glm_moe_dsa: {reason}")


def _flag_refusals(view: Any) -> list[tuple[str, bool, str]]:
    return [
        (
            "--enable-mixed-chunk",
            view.enable_mixed_chunk,
            "a batch of prefill and decode rows has no selection plan; leave the flag out",
        ),
        (
            "--enable-two-batch-overlap",
            view.enable_two_batch_overlap,
            "the halves do not carry a selection from full to shared layers; leave the flag out",
        ),
        (
            "--enable-eplb",
            view.enable_eplb,
            "moving experts between ranks is untested with this model; leave the flag out",
        ),
    ]


def _overrides(view: Any) -> dict[str, Any]:
    return json.loads(view.json_model_override_args or "{}")
