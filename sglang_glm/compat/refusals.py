"""What cannot be served for `glm_moe_dsa` is refused at start, in one sentence each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from glm_kernels.cache.layout import PAGE_SIZE
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from transformers import PretrainedConfig

from sglang_glm.attention import cuda_choice, registry
from sglang_glm.checkpoint.files import check_files
from sglang_glm.compat.topology_refusals import check_topology
from sglang_glm.config import FP8_BLOCK, GlmDsaConfig, is_glm_moe_dsa
from sglang_glm.platform import has_accelerator, has_cuda

#: What `--kv-cache-dtype` stores, by torch's names; None follows the model.
KV_DTYPES = {"auto": None, "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}

_BACKEND_FIELDS: tuple[tuple[str, registry.Phase], ...] = (
    ("dsa_prefill_backend", "prefill"),
    ("dsa_decode_backend", "decode"),
    ("dsa_topk_backend", "topk"),
    ("speculative_dsa_topk_backend", "topk"),
)

#: The default of `--dsa-topk-backend`.
STOCK_TOPK = "sgl-kernel"

#: Quantisation methods of a checkpoint that this model is served with.
QUANTIZATIONS = (None, "fp8")


def refuse_unserved(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the config and the flags of a GLM model before SGLang adjusts anything for it.

    Raises:
        ValueError: names the field, the flag or the file, and what to do.
    """
    view = resolving_view(server_args)
    if is_glm_moe_dsa(model_config_of(view).hf_config.architectures):
        facts = check_config(view)
        if view.load_format in ("auto", "safetensors"):
            check_files(Path(view.model_path))
        check_topology(view, facts)
        check_flags(view, facts)
        check_backends(view, facts)
    previous(server_args)


def check_config(view: Any) -> GlmDsaConfig:
    """Check the model's config.json as it is written: transformers fills in fields that lack.

    Returns:
        The model's facts.

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
    if facts.weight_block_size not in (None, (FP8_BLOCK, FP8_BLOCK)):
        raise ValueError(
            f"quantization_config.weight_block_size is {list(facts.weight_block_size)}: glm_moe_dsa is "
            f"served from FP8 checkpoints with one scale a block of {FP8_BLOCK} x {FP8_BLOCK}"
        )
    return facts


def check_flags(view: Any, facts: GlmDsaConfig) -> None:
    """Refuse flags that the sparse path would ignore or break on.

    Raises:
        ValueError: names the flag and the reason.
    """
    for flag, is_set, reason in _flag_refusals(view, facts):
        if is_set:
            raise ValueError(f"{flag} is not served for glm_moe_dsa: {reason}")


def check_backends(view: Any, facts: GlmDsaConfig) -> None:
    """Refuse a DSA backend that cannot run here, before anything is loaded for it.

    Raises:
        ValueError: names the flag, the reason and what can be chosen instead.
    """
    device: registry.Device = "cuda" if has_accelerator() else "cpu"
    dtype = KV_DTYPES.get(view.kv_cache_dtype, view.kv_cache_dtype)
    kv_dtype = dtype or str(model_config_of(view).dtype).removeprefix("torch.")
    for field, phase in _BACKEND_FIELDS:
        name = getattr(view, field)
        # SGLang's top-k flags have a default, so their value does not tell whether anybody chose it.
        if name is None or (phase == "topk" and name == STOCK_TOPK):
            continue
        reason = registry.refusal(phase, name, device=device, kv_dtype=kv_dtype)
        if reason is None and device == "cuda" and name in registry.names(phase, "cuda"):
            reason = _cuda_obstacle(view, facts, name)
        if reason is not None:
            raise ValueError(f"--{field.replace('_', '-')}: {reason}")


def _cuda_obstacle(view: Any, facts: GlmDsaConfig, name: str) -> str | None:
    """Why a kernel of ours cannot serve this model on this device with these flags."""
    if not has_cuda():
        return f"{name!r} needs an NVIDIA GPU; leave the flag out"
    reason = cuda_choice.impossible(
        num_heads=facts.num_attention_heads * view.attn_dp_size // view.tp_size,
        capability=torch.cuda.get_device_capability(),
    )
    if reason is not None:
        return f"{name!r}: {reason}"
    for flag, is_set in (
        ("--enable-hisparse", view.enable_hisparse),
        ("--dcp-size", (view.dcp_size or 1) > 1),
        ("--attn-cp-size", view.attn_cp_size > 1),
    ):
        if is_set:
            return f"{name!r} does not serve with {flag}; leave one of the two out"
    return None


def _flag_refusals(view: Any, facts: GlmDsaConfig) -> list[tuple[str, bool, str]]:
    dense = [
        (
            f"--{field.replace('_', '-')} {getattr(view, field)}",
            not has_accelerator() and getattr(view, field) not in (None, "dsa", "nsa"),
            "SGLang's other CPU backends cannot read its latent cache; leave the flag out",
        )
        for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ]
    return [
        *dense,
        *_without_effect_on_cpu(view, facts),
        *_draft_refusals(view, facts),
        *_capture_refusals(view),
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
            f"--context-length {view.context_length}",
            view.context_length is not None and view.context_length < 1,
            "a context has at least 1 token; leave the flag out for the model's own",
        ),
        (
            "--is-embedding",
            view.is_embedding,
            "the model generates and has no embedding of a text; leave the flag out",
        ),
        (
            "--enable-eplb",
            view.enable_eplb,
            "moving experts between ranks is untested with this model; leave the flag out",
        ),
    ]


def _capture_refusals(view: Any) -> list[tuple[str, bool, str]]:
    """Selections and experts in the answer: where SGLang's record of them is too small or another's."""
    chunk = view.chunked_prefill_size
    return [
        (
            "--enable-return-indexer-topk with --speculative-algorithm",
            view.enable_return_indexer_topk and view.speculative_algorithm is not None,
            "the draft's selections would replace the target's in the answer; leave one of them out",
        ),
        *(
            (
                f"{flag} with --chunked-prefill-size {chunk}",
                is_set and chunk is not None and chunk <= 0,
                "what a batch selects is kept in a buffer of one chunk, which an unchunked prompt "
                "overruns; give a chunk as long as the longest prompt",
            )
            for flag, is_set in (
                ("--enable-return-indexer-topk", view.enable_return_indexer_topk),
                ("--enable-return-routed-experts", view.enable_return_routed_experts),
            )
        ),
    ]


def _without_effect_on_cpu(view: Any, facts: GlmDsaConfig) -> list[tuple[str, bool, str]]:
    """Flags that would be ignored, or fail later with a message about something else."""
    on_cpu = not has_accelerator()
    return [
        (
            f"--page-size {view.page_size}",
            on_cpu and view.page_size not in (None, PAGE_SIZE),
            f"its caches have pages of {PAGE_SIZE} tokens; leave the flag out",
        ),
        (
            f"--max-total-tokens {view.max_total_tokens}",
            on_cpu and view.max_total_tokens is not None and view.max_total_tokens < PAGE_SIZE,
            f"it holds no whole page of {PAGE_SIZE} tokens; raise it or leave the flag out",
        ),
        (
            "--enable-hisparse",
            on_cpu and view.enable_hisparse,
            "it moves selected rows between a GPU and its host; leave the flag out",
        ),
        (
            "--enable-pdmux",
            on_cpu and view.enable_pdmux,
            "it divides a GPU between prefill and decode; leave the flag out",
        ),
        (
            "--enable-lora (or --lora-paths)",
            on_cpu and bool(view.enable_lora or view.lora_paths),
            "SGLang applies adapters with CUDA kernels; merge them into the checkpoint",
        ),
        (
            f"--quantization {view.quantization}",
            on_cpu and view.quantization not in (None, "unquant", facts.quant_method),
            "on the CPU weights are served as the checkpoint has them, BF16 or dequantised FP8; "
            "leave the flag out",
        ),
    ]


def _draft_refusals(view: Any, facts: GlmDsaConfig) -> list[tuple[str, bool, str]]:
    """Drafts without a layer to draft with, and lengths that SGLang uses before it has looked at them."""
    steps, topk = view.speculative_num_steps, view.speculative_eagle_topk
    chain = view.speculative_algorithm in ("EAGLE", "NEXTN") and not view.speculative_adaptive
    lone = steps is None and view.speculative_num_draft_tokens is not None
    own_draft = view.speculative_draft_model_path in (None, view.model_path)
    return [
        (
            f"--speculative-algorithm {view.speculative_algorithm}",
            chain and own_draft and facts.mtp_layer_id is None,
            "the checkpoint has no MTP layer (num_nextn_predict_layers is 0); leave the flag out",
        ),
        (
            f"--speculative-num-steps {steps}",
            chain and steps is not None and steps < 1,
            "a draft has at least 1 step; leave --speculative-algorithm out to serve without drafts",
        ),
        (
            f"--speculative-num-steps {steps} with --speculative-eagle-topk {topk}",
            chain and ((steps is None) != (topk is None) or lone),
            "SGLang fills them in only together; give both (topk 1), or leave out all the lengths of "
            "a draft",
        ),
    ]


def _overrides(view: Any) -> dict[str, Any]:
    text = view.json_model_override_args or "{}"
    overrides = json.loads(text)
    if not isinstance(overrides, dict):
        raise ValueError(
            f"--json-model-override-args {text}: expected a JSON object of fields of config.json"
        )
    return overrides
