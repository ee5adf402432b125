"""The automatic decision on CUDA, the refusals of flags, and the symbols of SGLang that both rest on.

test_decision_table     a row for each rule of `cuda_choice`
test_named_form         a flag that names ours gets ours, whatever was measured
test_described          what logs and the doctor say of usual batches
test_flag_refusals      names that cannot serve on a device, with the reason
test_impossible_choice  the same at start, with the flag and what excludes it
test_resolution         what a missing --dsa-decode-backend becomes
test_symbols_and_seams  every stock signature and field that the CUDA rows rely on; a process that
                      believes in a GPU applies and probes those rows
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm.attention import cuda_choice, registry
from sglang_glm.attention.cuda_choice import AttentionWork, choose_attention, named_form
from sglang_glm.compat import refusals
from sglang_glm.compat.cuda import arg_groups
from sglang_glm.compat.ledger import SEAMS

FP8, BF16 = cuda_choice.FP8, cuda_choice.BF16


def work(phase: str, heads: int, batch: int, next_n: int = 1, **fields: Any) -> AttentionWork:
    defaults: dict[str, Any] = {"kv_dtype": FP8, "peer": "flashmla_kv"}
    return AttentionWork(
        phase=phase,  # type: ignore[arg-type]
        num_heads=heads,
        batch_size=batch,
        next_n=next_n,
        **{**defaults, **fields},
    )


@pytest.mark.parametrize(
    ("call", "form"),
    [
        (work("decode", 8, 1), "glm_sparse"),
        (work("decode", 8, 192), "glm_sparse"),
        (work("decode", 8, 400), "stock"),
        (work("decode", 16, 8), "glm_sparse"),
        (work("decode", 64, 1), "glm_sparse"),
        (work("decode", 64, 8), "glm_sparse"),
        (work("decode", 64, 193), "stock"),
        (work("decode", 64, 192), "glm_sparse"),
        (work("verify", 8, 32, 6), "glm_verify"),
        (work("verify", 8, 4, 6), "glm_sparse"),
        (work("verify", 16, 32, 4), "glm_verify"),
        (work("verify", 16, 32, 6), "glm_sparse"),
        (work("verify", 4, 16, 9), "glm_sparse"),  # more rows than a shared list has bits for
        (work("verify", 4, 64, 1), "glm_sparse"),  # padded rows stand alone
        (work("verify", 64, 32, 6), "glm_sparse"),
        (work("verify", 64, 33, 6), "stock"),
        (work("prefill", 8, 100), "stock"),
        (work("decode", 8, 1, peer="fa3", kv_dtype=BF16), "stock"),
        (work("decode", 64, 8, peer="flashmla_sparse", kv_dtype=BF16), "glm_sparse"),
        (work("decode", 64, 64, peer="flashmla_sparse", kv_dtype=BF16), "stock"),
        (work("decode", 8, 1, capability=(10, 0)), "stock"),
        (work("decode", 8, 1, page_size=1), "stock"),
        (work("decode", 128, 1), "stock"),
    ],
)
def test_decision_table(call: AttentionWork, form: str) -> None:
    choice = choose_attention(call)
    assert choice.form == form and len(choice.reason) > 10


def test_named_form() -> None:
    assert named_form(work("decode", 64, 8)) == "glm_sparse"
    assert named_form(work("verify", 8, 32, 6)) == "glm_verify"
    assert named_form(work("verify", 64, 32, 6)) == "glm_sparse"
    assert named_form(work("verify", 4, 32, 12)) == "glm_sparse"
    assert named_form(work("prefill", 8, 500)) == "glm_sparse"


def test_described() -> None:
    rows = cuda_choice.describe(num_heads=8, kv_dtype=FP8, peer="flashmla_kv", capability=(9, 0))
    assert dict(rows)["verify 32 x 6"].form == "glm_verify"
    assert all(choice.reason for _, choice in rows)


@pytest.mark.parametrize(
    ("phase", "name", "device", "kv_dtype", "word"),
    [
        ("decode", "glm_auto", "cpu", BF16, "cuda"),
        ("decode", "glm_auto", "cuda", FP8, None),
        ("decode", "glm_sparse", "cuda", FP8, None),
        ("decode", "glm_sparse", "cuda", "float32", "float32"),
        ("prefill", "glm_masked", "cuda", BF16, "cpu"),
        ("prefill", "glm_auto", "cuda", BF16, "cpu"),
        ("topk", "glm_exact", "cuda", FP8, None),
        ("topk", "flashinfer", "cuda", FP8, None),
        ("decode", "flashmla_kv", "cpu", FP8, "glm_sparse"),
    ],
)
def test_flag_refusals(
    phase: registry.Phase, name: str, device: registry.Device, kv_dtype: str, word: str | None
) -> None:
    reason = registry.refusal(phase, name, device=device, kv_dtype=kv_dtype)
    assert reason is None if word is None else word in (reason or "")


def view(**fields: Any) -> SimpleNamespace:
    defaults = {
        "kv_cache_dtype": "fp8_e4m3",
        "dsa_prefill_backend": None,
        "dsa_decode_backend": None,
        "dsa_topk_backend": "sgl-kernel",
        "speculative_dsa_topk_backend": "sgl-kernel",
        "tp_size": 8,
        "attn_dp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "enable_hisparse": False,
    }
    return SimpleNamespace(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "capability", "words"),
    [
        ({}, (9, 0), None),
        ({"dsa_decode_backend": "glm_sparse"}, (9, 0), None),
        ({"dsa_decode_backend": "flashmla_kv"}, (8, 0), None),
        ({"dsa_decode_backend": "glm_sparse"}, (10, 0), ["--dsa-decode-backend", "10.0"]),
        ({"dsa_prefill_backend": "glm_masked"}, (9, 0), ["--dsa-prefill-backend", "cpu"]),
        (
            {"speculative_dsa_topk_backend": "glm_exact", "dcp_size": 2},
            (9, 0),
            ["--speculative-dsa-topk-backend", "--dcp-size"],
        ),
        (
            {"dsa_topk_backend": "glm_exact", "enable_hisparse": True},
            (9, 0),
            ["--dsa-topk-backend", "--enable-hisparse"],
        ),
    ],
)
def test_impossible_choice(
    fields: dict, capability: tuple, words: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "has_accelerator", lambda: True)
    monkeypatch.setattr(refusals, "has_cuda", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    facts: Any = SimpleNamespace(num_attention_heads=64)
    if words is None:
        refusals.check_backends(view(**fields), facts)
        return
    with pytest.raises(ValueError) as refused:
        refusals.check_backends(view(**fields), facts)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("fields", "declared", "expected"),
    [
        ({}, {"dsa_decode_backend": "flashmla_kv"}, "glm_auto"),
        ({"kv_cache_dtype": "bfloat16"}, {"dsa_decode_backend": "fa3"}, "fa3"),
        ({"enable_hisparse": True}, {"dsa_decode_backend": "flashmla_kv"}, "flashmla_kv"),
        ({"tp_size": 8, "attn_dp_size": 8}, {"dsa_decode_backend": "flashmla_kv"}, "glm_auto"),
        ({"dcp_size": 2}, {"dsa_decode_backend": "trtllm"}, "trtllm"),
        ({"dsa_decode_backend": "flashmla_kv"}, {}, None),
    ],
)
def test_resolution(
    fields: dict, declared: dict, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"]), num_attention_heads=64
    )
    monkeypatch.setattr(arg_groups, "model_config_of", lambda view: model)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    stock = {**declared, "dsa_prefill_backend": "flashmla_kv"}
    found = arg_groups.dsa_split_backend_resolution(lambda view: dict(stock), view(**fields))
    assert found == {**stock, **({"dsa_decode_backend": expected} if expected else {})}
    monkeypatch.setenv("SGLANG_GLM_CUDA_KERNELS", "named")
    found = arg_groups.dsa_split_backend_resolution(lambda view: dict(stock), view(**fields))
    assert found == stock


def test_symbols_and_seams() -> None:
    code = (
        "from tests.support.cuda_symbols import changed_symbols; print(changed_symbols()); "
        "import sglang_glm.compat.apply as apply; "
        "apply.active_scopes = lambda: {'everywhere', 'cuda'}; "
        "from sglang.srt.plugins import load_plugins; load_plugins(); "
        "seams = apply.needed_seams(); "
        "print(sum(s.scope == 'cuda' for s in seams), apply.probe_seams(seams))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SGLANG_GLM_HOST_PLATFORM": "off"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    changed, applied = result.stdout.splitlines()[-2:]
    assert changed == "[]"
    assert applied == f"{sum(seam.scope == 'cuda' for seam in SEAMS)} []"
