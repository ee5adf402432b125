"""Models and servers of the comparison."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.hf_config import build_config
from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.tokenizer import SpecialIds

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 154_880
CHUNK, TOP_K, DRAFT_TOKENS = 8192, 8, 6
ENV = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    # The dense form of short prompts needs a library that is not everywhere.
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
}
FLAGS = (
    "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch "
    f"--mem-fraction-static 0.75 --max-running-requests 32 --chunked-prefill-size {CHUNK} "
    "--cuda-graph-bs-decode 1 4 16 --cuda-graph-backend-prefill disabled"
)
EAGLE = (
    f"--speculative-algorithm EAGLE --speculative-num-steps {DRAFT_TOKENS - 1} "
    f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS}"
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two servers of one model: SGLang alone, and with this package.

    Attributes:
        heads: Query heads; 8 is what one of eight tensor-parallel ranks has.
        common: Flags of both.
        stock: Flags of SGLang alone.
        ours: Flags with this package; none means that it decides.
    """

    heads: int = 64
    mtp: bool
    common: str
    stock: str = ""
    ours: str = ""

    @property
    def rows_per_request(self) -> int:
        """Rows of one request in a step: one, or the draft tokens that a round verifies."""
        return DRAFT_TOKENS if self.mtp else 1

    def flags(self, side: str) -> list[str]:
        """Flags of a server; the one that records experts is ours."""
        own = self.stock if side == "stock" else self.ours
        return f"{FLAGS} {self.common} {EAGLE if self.mtp else ''} {own}".split()


_FP8, _BF16 = "--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype bfloat16"
#: FA3, SGLang's choice for BF16 on Hopper, is not in every installation.
_SPARSE = "--dsa-decode-backend flashmla_sparse"
_EXACT = "--dsa-topk-backend glm_exact --speculative-dsa-topk-backend glm_exact"

#: In order of value.
COMPARISONS: dict[str, Comparison] = {
    "fp8-mtp": Comparison(mtp=True, common=_FP8),
    "rank8-mtp": Comparison(mtp=True, common=_FP8, heads=8),
    "rank8": Comparison(mtp=False, common=_FP8, heads=8),
    "bf16-mtp": Comparison(
        mtp=True, common=_BF16, stock=_SPARSE, ours="--dsa-decode-backend glm_auto"
    ),
    "fp8-named": Comparison(
        mtp=True,
        common=_FP8,
        ours=f"--dsa-prefill-backend glm_sparse --dsa-decode-backend glm_sparse {_EXACT}",
    ),
    "fp8": Comparison(mtp=False, common=_FP8),
    "bf16": Comparison(
        mtp=False, common=_BF16, stock=_SPARSE, ours="--dsa-decode-backend glm_auto"
    ),
}


def write_model(
    folder: Path,
    heads: int,
    fp8_weights: bool,
    max_position: int,
    *,
    layers: int = 7,
    dense_layers: int = 3,
    experts: int = 32,
) -> Path:
    """Write the config.json of some layers of GLM-5.3, the first of them dense, and its MTP layer."""
    spec = CheckpointSpec(
        num_hidden_layers=layers,
        hidden_size=6144,
        vocab_size=VOCAB,
        num_attention_heads=heads,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        first_k_dense_replace=dense_layers,
        intermediate_size=12288,
        n_routed_experts=experts,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=2048,
        index_topk=2048,
        num_nextn_predict_layers=1,
        fp8=fp8_weights,
        max_position_embeddings=max_position,
    )
    ids = SpecialIds(endoftext=VOCAB - 1, stop=(VOCAB - 1,))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(build_config(spec, ids), indent=1))
    return folder


def write_plugins(folder: Path) -> Path:
    """Make SGLang find the weights' plugin, and this package where it is not installed."""
    plugins = {"glm_test_weights": "tests.gpu.serving.dummy_weights:register"}
    groups = {"sglang.srt.plugins": plugins}
    installed = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if "sglang_glm" not in installed.names:
        plugins["sglang_glm"] = "sglang_glm.plugin:register"
        groups["sglang.srt.platforms"] = {"sglang_glm": "sglang_glm.platform:activate"}
    info = folder / "glm_test_plugins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: glm-test-plugins\nVersion: 0\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder
