"""Which DSA backends can serve here, and a batch through those that do."""

from collections.abc import Iterator

import torch
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_ref import sparse_mla_ref
from glm_kernels.indexer.mqa_logits import mqa_logits
from glm_kernels.indexer.mqa_logits_ref import mqa_logits_ref
from glm_kernels.indexer.topk_indices import topk_indices
from glm_kernels.indexer.topk_indices_ref import topk_indices_ref

from sglang_glm.attention import cuda_choice, registry
from sglang_glm.diagnosis.findings import Finding
from sglang_glm.platform import has_accelerator


def check_backends(kv_dtype: str) -> Iterator[Finding]:
    """Each name of each flag, with the reason where it cannot serve.

    Args:
        kv_dtype: The KV cache's dtype, by torch's name.
    """
    device: registry.Device = "cuda" if has_accelerator() else "cpu"
    for phase, default in registry.HOST_DEFAULTS.items():
        for name in registry.names(phase):
            reason = registry.refusal(phase, name, device=device, kv_dtype=kv_dtype)
            chosen = device == "cpu" and name == default
            yield Finding(
                part=f"DSA backends for a {kv_dtype} cache",
                name=f"--dsa-{phase}-backend {name}",
                state="not needed" if reason else "ok",
                detail=reason or ("chosen without a flag" if chosen else "can be chosen"),
            )


def check_cuda_choice(kv_dtype: str) -> Iterator[Finding]:
    """What a missing --dsa-decode-backend becomes for some usual batches on this GPU.

    Args:
        kv_dtype: The KV cache's dtype, by torch's name.
    """
    if not torch.cuda.is_available():
        return
    # What SGLang itself would run on Hopper.
    peer = "flashmla_kv" if kv_dtype == cuda_choice.FP8 else "fa3"
    for num_heads in (64, 8):
        described = cuda_choice.describe(
            num_heads=num_heads,
            kv_dtype=kv_dtype,
            peer=peer,
            capability=torch.cuda.get_device_capability(),
        )
        for batch, choice in described:
            form = peer if choice.form == "stock" else choice.form
            yield Finding(
                part=f"decision for a {kv_dtype} cache, no flag given",
                name=f"{batch}, {num_heads} heads a rank",
                state="ok",
                detail=f"{form}: {choice.reason}",
            )


def self_check() -> Iterator[Finding]:
    """One small batch of index scores, selection and sparse attention against the references."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 128, generator=generator)
    k = torch.randn(40, 128, generator=generator)
    weights = torch.randn(3, 4, generator=generator)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.tensor([38, 39, 40], dtype=torch.int32)
    logits = mqa_logits(q, k, weights, starts, ends)
    expected = mqa_logits_ref(q, k, weights, starts, ends, dtype=torch.float64)
    yield _compare("index scores", logits.nan_to_num(neginf=0), expected.nan_to_num(neginf=0))
    slots = topk_indices(logits, 8)
    yield _compare("selection", slots, topk_indices_ref(logits, 8))
    rows = torch.randn(40, 1, 576, generator=generator)
    attended = torch.randn(3, 2, 576, generator=generator)
    out = sparse_mla(attended, rows, slots, 0.0625)[0]
    yield _compare("sparse attention", out, sparse_mla_ref(attended, rows, slots, 0.0625)[0])


def _compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> Finding:
    error = (found.double() - expected.double()).abs().max().item()
    good = error <= 1e-3
    return Finding(
        part="self-check on the CPU",
        name=name,
        state="ok" if good else "failed",
        detail=f"differs from the reference by at most {error:.1e}",
        remedy="" if good else "report this with the output of `sglang-glm doctor --json`",
    )
