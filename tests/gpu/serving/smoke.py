"""The wiring on a GPU in seconds, without a server: run it before any server is started.

    python -m tests.gpu.serving.smoke --out FOLDER

Each step prints "ok", or "FAILED" with what went wrong; the exit status is the number of failures. What
`sglang-glm doctor` says of the machine is left in `FOLDER/doctor_h200.json`; docs/bench keeps a published one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]
DEVICE = "cuda"
TOPK = 2048


def plugin() -> str:
    """The plugin applies in this process, and every row that CUDA needs is in effect."""
    import importlib.metadata

    from sglang.srt.plugins import load_plugins

    names = importlib.metadata.entry_points(group="sglang.srt.plugins").names
    if "sglang_glm" not in names:
        from sglang_glm.plugin import register

        register()  # the program that starts servers writes the missing entry point itself
    load_plugins()
    from sglang_glm.compat.apply import needed_seams, probe_seams
    from sglang_glm.compat.ledger import SEAMS

    seams = needed_seams()
    failed = probe_seams(seams)
    assert not failed, failed
    missing = [seam.target for seam in SEAMS if seam.scope == "cuda" and seam not in seams]
    assert not missing, f"{missing} do not apply; is the GPU visible?"
    return f"{len(seams)} rows"


def symbols() -> str:
    """Stock signatures are those that were read."""
    from tests.support.cuda_symbols import SIGNATURES, changed_symbols

    changed = changed_symbols()
    assert not changed, "\n".join(changed)
    return f"{len(SIGNATURES)} signatures"


def latent_bytes() -> str:
    """SGLang's pool writes the rows that our attention reads."""
    from glm_kernels.cache.mla_rows import pack_mla_rows
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    latent = torch.randn(300, 512, device=DEVICE).bfloat16()
    rope = torch.randn(300, 64, device=DEVICE).bfloat16()
    parts = quantize_k_cache_separate(latent[:, None], rope[:, None])
    stock = torch.cat([part.view(torch.uint8).reshape(300, -1) for part in parts], dim=1)
    differing = int((stock != pack_mla_rows(latent, rope)).sum())
    assert differing == 0, f"{differing} of {stock.numel()} bytes differ"
    return "656 bytes a row"


def index_bytes() -> str:
    """SGLang's fused store writes the pages that our scoring reads."""
    from glm_kernels.cache.index_pages import load_index_k, store_index_k
    from sglang.kernels.ops.kvcache.dsa_fused_store_index_cache import fused_store_index_k_cache

    keys = torch.randn(200, 128, device=DEVICE).bfloat16()
    slots = torch.randperm(640, device=DEVICE)[:200]
    stock, ours = (torch.zeros(10, 8448, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    fused_store_index_k_cache(keys, stock, slots, 64)
    store_index_k(ours, slots, keys)
    differing = int((stock != ours).sum())
    read = load_index_k(stock, slots)
    error = (read.float() - keys.float()).abs().max().item()
    assert error < 0.3, f"stock pages read back with an error of {error}"
    return f"{differing} bytes differ from our own store; read back within {error:.3f}"


def warm_up() -> str:
    """Every kernel that a server needs compiles and loads."""
    from sglang_glm.compat.cuda import warm_up as warm

    for heads, packed, next_n in ((64, True, 6), (8, True, 6), (64, False, 6), (64, True, 1)):
        warm.load_attention_kernels(0, heads, packed, TOPK, next_n)
    warm.load_selection_kernels(0, TOPK)
    warm.load_verify_kernels(0, 32, 6, TOPK)
    torch.cuda.synchronize()
    return "loaded"


def exact_selection() -> str:
    """`glm_exact` in the forms of decode, prefill and ragged prefill, against the CPU."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

    from sglang_glm.compat.cuda.dsa_topk_backend import ExactTopk

    logits = torch.randint(0, 50, (6, 9000), device=DEVICE).float()
    lengths = torch.tensor([1, 2048, 9000, 0, 64, 5000], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(6 * 141, device=DEVICE).view(6, 141).int()
    metadata = SimpleNamespace(real_page_table=table, token_to_batch_idx=None)
    host = SimpleNamespace(real_page_table=table.cpu(), token_to_batch_idx=None)
    paged, ragged = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED
    got = ExactTopk().topk_transform(logits, lengths, TOPK, paged, metadata)
    want = ExactTopk().topk_transform(logits.cpu(), lengths.cpu(), TOPK, paged, host)
    assert torch.equal(got.cpu(), want), "decode"
    starts = torch.tensor([0, 5, 0, 8000, 4000, 4000], dtype=torch.int32, device=DEVICE)
    args = {"topk_indices_offset": starts, "row_starts": starts}
    got = ExactTopk().topk_transform(logits, lengths, TOPK, ragged, None, **args)
    args = {name: value.cpu() for name, value in args.items()}
    want = ExactTopk().topk_transform(logits.cpu(), lengths.cpu(), TOPK, ragged, None, **args)
    assert torch.equal(got.cpu(), want), "ragged"
    owners = torch.tensor([0, 0, 1, 1, 5, 5], dtype=torch.int32, device=DEVICE)
    metadata.token_to_batch_idx, host.token_to_batch_idx = owners, owners.cpu()
    metadata.real_page_table, host.real_page_table = table[:, :], table.cpu()
    got = ExactTopk().topk_transform(
        logits, lengths, TOPK, paged, metadata, row_starts=starts, batch_idx_list=owners
    )
    want = ExactTopk().topk_transform(
        logits.cpu(),
        lengths.cpu(),
        TOPK,
        paged,
        host,
        row_starts=starts.cpu(),
        batch_idx_list=owners.cpu(),
    )
    assert torch.equal(got.cpu(), want), "prefill"
    return "three forms"


def verify_selection() -> str:
    """Our scoring of verify rows selects what DeepGEMM's scores select, in a graph too."""
    from glm_kernels.bench.peers import deep_gemm_logits, row_lengths
    from glm_kernels.indexer import paged_mqa_topk_sm90
    from glm_kernels.testing.generate import paged_indexer
    from glm_kernels.testing.shapes import IndexerShape

    from sglang_glm.layers.exact_selection import select_positions
    from sglang_glm.layers.verify_selection import select_verify_rows

    shape = IndexerShape(name="smoke", lengths=(9000, 40, 3000, 20_000), next_n=6)
    p = paged_indexer(shape, 0, DEVICE)
    table = p.block_table.repeat_interleave(6, 0)
    inputs = (p.q.flatten(0, 1), p.weights.flatten(0, 1), p.index_cache, p.cache_seqlens, table)

    def run() -> torch.Tensor:
        return select_verify_rows(*inputs, TOPK, return_slots=True)

    got = run()
    logits = deep_gemm_logits(p)()
    want = select_positions(logits, row_lengths(p), TOPK, block_table=table)
    shared = [
        len(set(a.tolist()) & set(b.tolist())) / max(1, len(set(b.tolist())))
        for a, b in zip(got, want, strict=True)
    ]
    assert min(shared) > 0.995, f"shares {min(shared):.4f} of DeepGEMM's selection"
    assert torch.equal(_replayed(run), got), "a graph replay differs"
    matrix_bytes = paged_mqa_topk_sm90.MATRIX_BYTES
    paged_mqa_topk_sm90.MATRIX_BYTES = 0  # as under a capture for a context of 1M
    try:
        assert torch.equal(run(), got), "the single pass selects otherwise"
        assert torch.equal(_replayed(run), got), "a graph replay of the single pass differs"
    finally:
        paged_mqa_topk_sm90.MATRIX_BYTES = matrix_bytes
    return f"shares at least {min(shared):.4f} of DeepGEMM's selection"


def attention() -> str:
    """The backend's decode and verify, eager and in a graph, against FlashMLA and the reference."""
    from glm_kernels.attention.sparse_mla_torch import sparse_mla_torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from tests.support.cuda_backend import SCALE, backend, call, selections

    errors = []
    for heads, packed in ((64, True), (8, True), (64, False)):
        for mode, requests, next_n in (
            (ForwardMode.DECODE, 5, 1),
            (ForwardMode.TARGET_VERIFY, 16, 6),
            (ForwardMode.EXTEND, 70, 1),
        ):
            made = backend(
                heads=heads,
                packed=packed,
                next_n=next_n,
                num_slots=64 * 80,
                topk=TOPK,
                device=DEVICE,
            )
            rows = requests * next_n
            q = torch.randn(rows, heads, 576, device=DEVICE).bfloat16()
            slots = selections(rows, TOPK, 64 * 80, DEVICE)

            def run(made=made, mode=mode, q=q, slots=slots) -> torch.Tensor:
                made._union_of = None
                return call(made, mode, q, slots)

            got = run()
            want = sparse_mla_torch(q, made.token_to_kv_pool.rows, slots, SCALE)[0]
            errors.append((got.float() - want.float()).abs().max().item())
            what = f"{heads} heads, packed {packed}, {mode.name}"
            assert errors[-1] < 0.02, f"{what}: differs by {errors[-1]}"
            assert torch.equal(_replayed(run), got), f"{what}: a graph replay differs"
    return f"within {max(errors):.4f} of the reference"


def draft_steps() -> str:
    """Drafted slots join a selection inside a graph."""
    from sglang_glm.speculative.drafted_slots import add_drafted

    req_to_token = torch.randperm(4 * 4096, device=DEVICE).view(4, 4096).int()
    selection = torch.full((2, TOPK), -1, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor([7, 3000], device=DEVICE)
    requests = torch.tensor([2, 0], device=DEVICE)

    def run() -> torch.Tensor:
        return add_drafted(selection, seq_lens, 3, req_to_token, requests)

    assert torch.equal(_replayed(run), run())
    assert run()[0, 7:11].tolist() == req_to_token[2, 7:11].tolist()
    assert run()[1, -4:].tolist() == req_to_token[0, 3000:3004].tolist()
    return "in a graph"


def doctor(folder: Path) -> str:
    """`sglang-glm doctor` in a process of its own, for a cache of FP8 rows; its findings are kept."""
    from tests.gpu.serving.shapes import write_plugins

    with tempfile.TemporaryDirectory() as plugins:
        paths = [str(write_plugins(Path(plugins))), str(ROOT), str(ROOT / "kernels")]
        words = ["doctor", "--json", "--kv-cache-dtype", "float8_e4m3fn"]
        result = subprocess.run(
            [sys.executable, "-m", "sglang_glm.cli.main", *words],
            env={**os.environ, "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
        )
    report = json.loads(result.stdout or "{}")
    assert report, result.stderr[-2000:]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "doctor_h200.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [f"{f['name']}: {f['detail']}" for f in report["findings"] if f["state"] == "failed"]
    assert not failed, "; ".join(failed)
    return f"{len(report['findings'])} findings"


def _replayed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return out


STEPS: tuple[Callable[[], str], ...] = (
    symbols,  # before the plugin puts other functions in their place
    plugin,
    latent_bytes,
    index_bytes,
    warm_up,
    exact_selection,
    verify_selection,
    attention,
    draft_steps,
)


def main() -> int:
    """Run every step; the number of failures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="where to leave doctor_h200.json")
    out = parser.parse_args().out
    steps = {step.__name__: step for step in STEPS}
    if out is not None:
        steps["doctor"] = partial(doctor, out)
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    failures = 0
    for name, step in steps.items():
        started = time.monotonic()
        try:
            outcome = f"ok      {step()}"
        except Exception as error:
            failures += 1
            outcome = f"FAILED  {type(error).__name__}: {error}"
            traceback.print_exc(limit=4, file=sys.stdout)
        print(f"{name:<18}{outcome}  [{time.monotonic() - started:.1f} s]", flush=True)
    print(f"{failures} of {len(steps)} steps failed")
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
