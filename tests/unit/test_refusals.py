"""Flags and configs at start: each takes effect or is refused with a sentence that names it.

test_outcomes          every row of `CASES`, through SGLang's own argument resolution
test_reference_command the start command of GLM's documents: accepted by the parser as it stands
"""

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.resolve import resolve

MODEL = checkpoint("--mtp", "--index-topk", "8")

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
    "stock prefill": (
        ["--dsa-prefill-backend", "flashmla_sparse_q8"],
        ["--dsa-prefill-backend", "flashmla_sparse_q8", "CUDA", "glm_sparse"],
    ),
    "stock decode": (["--dsa-decode-backend", "flashmla_kv"], ["--dsa-decode-backend", "CUDA"]),
    "stock topk": (["--dsa-topk-backend", "torch"], ["--dsa-topk-backend", "glm_exact"]),
    "mixed chunk": (["--enable-mixed-chunk"], ["--enable-mixed-chunk"]),
    "two batch overlap": (["--enable-two-batch-overlap"], ["--enable-two-batch-overlap"]),
    "eplb": (["--enable-eplb"], ["--enable-eplb"]),
    "wrong rope": (
        ["--json-model-override-args", '{"indexer_rope_interleave": false}'],
        ["indexer_rope_interleave", "index_topk"],
    ),
    "shared first": (
        ["--json-model-override-args", json.dumps({"indexer_types": ["shared"] + ["full"] * 7})],
        ["indexer_types", "layer 0"],
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict]:
    cases = []
    for flags, expected in CASES.values():
        cases.append(
            (["--model", MODEL, *flags], list(expected) if isinstance(expected, dict) else [])
        )
    return dict(zip(CASES, resolve(cases), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_outcomes(outcomes: dict[str, dict], name: str) -> None:
    expected, outcome = CASES[name][1], outcomes[name]
    if isinstance(expected, dict):
        assert outcome == {"resolved": expected}
    else:
        assert "refused" in outcome, outcome
        for word in expected:
            assert word in outcome["refused"]


def test_changed_configs(tmp_path: Path) -> None:
    """A config.json as some writer left it: without a field, or with another quantisation."""
    written = json.loads((Path(MODEL) / "config.json").read_text())
    changes = {
        "index_topk": {"index_topk": None},
        "quant_method": {
            "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}
        },
        "rope_type": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    }
    cases = []
    for name, change in changes.items():
        directory = tmp_path / name
        directory.mkdir()
        for file in Path(MODEL).iterdir():
            if file.name != "config.json":
                (directory / file.name).symlink_to(file)
        changed = {key: value for key, value in {**written, **change}.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(changed))
        cases.append((["--model", str(directory)], []))
    for name, outcome in zip(changes, resolve(cases), strict=True):
        assert name in outcome.get("refused", ""), outcome


REFERENCE_COMMAND = (
    "--tp 8 --ep-size 8 --moe-a2a-backend deepep --attn-dp-size 8 --kv-cache-dtype fp8_e4m3 "
    "--dsa-topk-backend sgl-kernel --dsa-prefill-backend flashmla_sparse_q8 --dsa-decode-backend flashmla_kv "
    "--speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6 --reasoning-parser auto --tool-call-parser auto"
)


def test_reference_command() -> None:
    (outcome,) = resolve([(["--model", MODEL, *REFERENCE_COMMAND.split()], [])])
    # The parser takes every flag; on this platform the first that cannot hold is named.
    assert "refused" in outcome and "--dsa-prefill-backend" in outcome["refused"], outcome
