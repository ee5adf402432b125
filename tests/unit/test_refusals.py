"""Flags and configs at start: each takes effect or is refused with a sentence that names it.

test_outcomes          every row of `CASES`, through SGLang's own argument resolution
test_changed_configs   a config.json that lacks a field or describes what is not served
test_weight_files      cut short: refused unless they are not read
test_reference_command the start command of GLM's documents: accepted by the parser as it stands
"""

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.resolve import resolve

MODEL = checkpoint("--mtp", "--index-topk", "8")

#: A prefill server of two ranks that share one cache.
SHARDED = [
    *("--tp", "2", "--enable-kv-cache-sharding", "--disaggregation-mode", "prefill"),
    *("--disaggregation-transfer-backend", "nixl"),
]

#: name -> (flags, fields that must have taken a value) or (flags, words of the refusal)
CASES: dict[str, tuple[list[str], dict | list[str]]] = {
    "defaults": (
        [],
        {
            "attention_backend": "dsa",
            "dsa_prefill_backend": "glm_auto",
            "dsa_decode_backend": "glm_sparse",
            "dsa_topk_backend": "glm_exact",
            "page_size": 64,
            "sampling_backend": "pytorch",
            "max_running_requests": 32,
        },
    ),
    "user values win": (
        ["--max-running-requests", "3", "--mem-fraction-static", "0.1"],
        {"max_running_requests": 3, "mem_fraction_static": 0.1},
    ),
    "masked prefill": (
        ["--dsa-prefill-backend", "glm_masked"],
        {"dsa_prefill_backend": "glm_masked"},
    ),
    "sparse prefill": (
        ["--dsa-prefill-backend", "glm_sparse"],
        {"dsa_prefill_backend": "glm_sparse"},
    ),
    "exact topk": (["--dsa-topk-backend", "glm_exact"], {"dsa_topk_backend": "glm_exact"}),
    "fp8 cache": (["--kv-cache-dtype", "fp8_e4m3"], {"kv_cache_dtype": "fp8_e4m3"}),
    "bf16 cache": (["--kv-cache-dtype", "bf16"], {"kv_cache_dtype": "bfloat16"}),
    "fp8_e5m2 cache": (["--kv-cache-dtype", "fp8_e5m2"], ["fp8_e5m2", "fp8_e4m3"]),
    "fp16": (["--dtype", "float16"], ["--dtype float16", "add --kv-cache-dtype bf16"]),
    "fp16 over bf16": (
        ["--dtype", "float16", "--kv-cache-dtype", "bf16"],
        {"dtype": "float16", "kv_cache_dtype": "bfloat16"},
    ),
    "stock prefill": (
        ["--dsa-prefill-backend", "flashmla_sparse_q8"],
        ["--dsa-prefill-backend", "flashmla_sparse_q8", "CUDA", "glm_sparse"],
    ),
    "stock decode": (["--dsa-decode-backend", "flashmla_kv"], ["--dsa-decode-backend", "CUDA"]),
    "stock topk": (["--dsa-topk-backend", "torch"], ["--dsa-topk-backend", "glm_exact"]),
    "dense backend": (
        ["--attention-backend", "torch_native"],
        ["--attention-backend torch_native", "leave the flag out"],
    ),
    "dense prefill": (
        ["--prefill-attention-backend", "torch_native"],
        ["--prefill-attention-backend torch_native", "leave the flag out"],
    ),
    "mixed chunk": (["--enable-mixed-chunk"], ["--enable-mixed-chunk"]),
    "page size": (["--page-size", "1"], ["--page-size 1", "pages of 64", "leave the flag out"]),
    "our page size": (["--page-size", "64"], {"page_size": 64}),
    "no page": (["--max-total-tokens", "32"], ["--max-total-tokens 32", "page of 64"]),
    "adapters": (["--enable-lora", "--max-lora-rank", "8"], ["--enable-lora", "merge them"]),
    "quantising at load": (
        ["--quantization", "fp8"],
        ["--quantization fp8", "as the checkpoint has them", "leave the flag out"],
    ),
    "half a draft length": (
        ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"],
        ["--speculative-num-steps 3 with --speculative-eagle-topk None", "give both"],
    ),
    "draft tokens alone": (
        ["--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", "4"],
        ["--speculative-num-steps None", "give both"],
    ),
    "no layer to draft with": (
        [
            *("--speculative-algorithm", "EAGLE"),
            *("--json-model-override-args", '{"num_nextn_predict_layers": 0}'),
        ],
        ["--speculative-algorithm EAGLE", "no MTP layer"],
    ),
    "no draft steps": (
        ["--speculative-algorithm", "EAGLE", *("--speculative-num-steps", "0")],
        ["--speculative-num-steps 0", "at least 1 step"],
    ),
    "overrides of no object": (
        ["--json-model-override-args", "[]"],
        ["--json-model-override-args []", "expected a JSON object"],
    ),
    "two batch overlap": (["--enable-two-batch-overlap"], ["--enable-two-batch-overlap"]),
    "no context": (["--context-length", "0"], ["--context-length 0", "at least 1 token"]),
    "hisparse": (["--enable-hisparse"], ["--enable-hisparse", "a GPU and its host"]),
    "pdmux": (["--enable-pdmux"], ["--enable-pdmux", "divides a GPU"]),
    "embedding": (["--is-embedding"], ["--is-embedding", "leave the flag out"]),
    "eplb": (["--enable-eplb"], ["--enable-eplb"]),
    "selections with drafts": (
        ["--enable-return-indexer-topk", "--speculative-algorithm", "EAGLE"],
        ["--enable-return-indexer-topk", "--speculative-algorithm"],
    ),
    "selections, no chunks": (
        ["--enable-return-indexer-topk", "--chunked-prefill-size", "-1"],
        ["--enable-return-indexer-topk with --chunked-prefill-size -1", "the longest prompt"],
    ),
    "experts, no chunks": (
        ["--enable-return-routed-experts", "--chunked-prefill-size", "-1"],
        ["--enable-return-routed-experts with --chunked-prefill-size -1", "the longest prompt"],
    ),
    "no chunks": (["--chunked-prefill-size", "-1"], {"chunked_prefill_size": -1}),
    "selections in chunks": (
        ["--enable-return-indexer-topk", "--chunked-prefill-size", "32768"],
        {"chunked_prefill_size": 32768, "enable_return_indexer_topk": True},
    ),
    "host tier": (
        ["--enable-hierarchical-cache"],
        {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"},
    ),
    "host tier, layers first": (
        ["--enable-hierarchical-cache", "--hicache-mem-layout", "layer_first"],
        {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"},
    ),
    "host tier, another layout": (
        ["--enable-hierarchical-cache", "--hicache-mem-layout", "page_head"],
        ["--hicache-mem-layout page_head", "layer_first"],
    ),
    "host tier with storage": (
        ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"],
        ["--hicache-storage-backend file", "pinned", "leave the flag out"],
    ),
    "prefill over nixl": (
        ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"],
        {"disable_overlap_schedule": True},
    ),
    "decode in stripes": (
        [
            *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"),
            *("--tp", "2", "--dcp-size", "2"),
        ],
        ["--disaggregation-mode decode with --dcp-size 2", "leave one of them out"],
    ),
    "decode over rdma": (
        ["--disaggregation-mode", "decode"],
        ["--disaggregation-transfer-backend mooncake", "RDMA", "nixl, mooncake_tcp"],
    ),
    "sharded prefill": (
        [*SHARDED, "--chunked-prefill-size", "100"],
        {"enable_kv_cache_sharding": True, "chunked_prefill_size": 128},
    ),
    "sharded prefill, rows in turn": (
        [*SHARDED, "--enable-prefill-cp", "--attn-cp-size", "2", "--cp-strategy", "interleave"],
        {"enable_kv_cache_sharding": True, "attn_cp_size": 2},
    ),
    "sharded alone": (
        ["--enable-kv-cache-sharding", "--tp", "2"],
        ["--enable-kv-cache-sharding without --disaggregation-mode prefill", "on another server"],
    ),
    "sharded by one": (SHARDED[2:], ["--enable-kv-cache-sharding", "tp_size > 1"]),
    "sharded drafts": (
        [*SHARDED, "--speculative-algorithm", "EAGLE"],
        ["--enable-kv-cache-sharding with --speculative-algorithm EAGLE", "leave one of them out"],
    ),
    "sharded host tier": (
        [*SHARDED, "--enable-hierarchical-cache"],
        ["--enable-kv-cache-sharding with --enable-hierarchical-cache", "leave one of them out"],
    ),
    "sharded stages": (
        [*SHARDED, "--pp-size", "2"],
        ["--enable-kv-cache-sharding with --pp-size 2", "leave one of them out"],
    ),
    "sharded groups": (
        [*SHARDED, "--attn-dp-size", "2"],
        ["--enable-kv-cache-sharding with --attn-dp-size 2", "leave one of them out"],
    ),
    "sharded over mooncake": (
        [*SHARDED, "--disaggregation-transfer-backend", "mooncake_tcp"],
        ["--disaggregation-transfer-backend mooncake", "choose nixl"],
    ),
    "sharded in one piece": (
        [*SHARDED, "--chunked-prefill-size", "-1"],
        ["--enable-kv-cache-sharding", "--chunked-prefill-size"],
    ),
    "wrong rope": (
        ["--json-model-override-args", '{"indexer_rope_interleave": false}'],
        ["indexer_rope_interleave", "index_topk"],
    ),
    "shared first": (
        ["--json-model-override-args", json.dumps({"indexer_types": ["shared"] + ["full"] * 7})],
        ["indexer_types", "layer 0"],
    ),
}


#: A config.json as some writer left it: without a field, with another quantisation or RoPE.
CHANGES: dict[str, dict] = {
    "index_topk": {"index_topk": None},
    "quant_method": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
    "weight_block_size": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}
    },
    "rope_type": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
}

#: The start command of GLM's documents.
REFERENCE_COMMAND = (
    "--tp 8 --ep-size 8 --moe-a2a-backend deepep --attn-dp-size 8 --kv-cache-dtype fp8_e4m3 "
    "--dsa-topk-backend sgl-kernel --dsa-prefill-backend flashmla_sparse_q8 "
    "--dsa-decode-backend flashmla_kv --speculative-algorithm EAGLE --speculative-num-steps 5 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6 --reasoning-parser auto "
    "--tool-call-parser auto"
)


def changed_copy(directory: Path, change: dict) -> str:
    """The checkpoint with some fields of its config.json changed or removed."""
    directory.mkdir()
    for file in Path(MODEL).iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    written = json.loads((Path(MODEL) / "config.json").read_text())
    changed = {k: v for k, v in {**written, **change}.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(changed))
    return str(directory)


def shortened(directory: Path) -> str:
    """The checkpoint without the last byte of a file."""
    file = next(directory.glob("*.safetensors"))
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:-1])
    return str(directory)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every command line of this module, resolved in one process."""
    root = tmp_path_factory.mktemp("configs")
    cases = {
        name: (["--model", MODEL, *flags], list(expected) if isinstance(expected, dict) else [])
        for name, (flags, expected) in CASES.items()
    }
    for name, change in CHANGES.items():
        cases[name] = (["--model", changed_copy(root / name, change)], [])
    short = changed_copy(root / "short", {})
    cases["cut short"] = (["--model", shortened(Path(short))], [])
    cases["cut short, not read"] = (["--model", short, "--load-format", "dummy"], ["load_format"])
    cases["reference command"] = (["--model", MODEL, *REFERENCE_COMMAND.split()], [])
    return dict(zip(cases, resolve(list(cases.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_outcomes(outcomes: dict[str, dict], name: str) -> None:
    expected, outcome = CASES[name][1], outcomes[name]
    if isinstance(expected, dict):
        assert outcome == {"resolved": expected}
    else:
        assert "refused" in outcome, outcome
        for word in expected:
            assert word in outcome["refused"]


@pytest.mark.parametrize("name", CHANGES)
def test_changed_configs(outcomes: dict[str, dict], name: str) -> None:
    assert name in outcomes[name].get("refused", ""), outcomes[name]


def test_reference_command(outcomes: dict[str, dict]) -> None:
    # The parser takes every flag; what cannot hold on this platform is named.
    refused = outcomes["reference command"].get("refused", "")
    assert "deepep" in refused or "--dsa-prefill-backend" in refused, outcomes["reference command"]


def test_weight_files(outcomes: dict[str, dict]) -> None:
    assert "bytes, expected" in outcomes["cut short"].get("refused", "")
    assert outcomes["cut short, not read"] == {"resolved": {"load_format": "dummy"}}
