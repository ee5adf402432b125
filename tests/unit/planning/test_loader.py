"""Weight bytes per GPU against the parameters SGLang's own model class creates for rank 0.

BF16 and FP8 with its scales, module by module. One difference is left out on purpose: only on CUDA
does SGLang fuse `wk` with `weights_proj`, and dequantise it for that.
"""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_glm.config import GlmDsaConfig
from sglang_glm.planning import weights
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import RELEASED

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sglang_model_bytes.py")
TINY = RELEASED["zai-org/GLM-5.2"] | {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "intermediate_size": 1024,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
LAYOUTS = [(1, 1, 1), (8, 1, 1), (8, 1, 4), (8, 1, 8), (8, 2, 8), (8, 8, 8), (8, 8, 1)]

# Modules that SGLang stacks, by the suffix of its parameter.
STACKED = {
    "w13_weight": ("gate_proj", "up_proj"),
    "w2_weight": ("down_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def planned_bytes(content, precision, layout):
    config = GlmDsaConfig.from_hf(content)
    weights.check_fp8_blocks(config, layout)
    totals = collections.Counter()
    for weight in weights.iter_weights(config, with_mtp=False):
        words = [word for word in weight.name.split(".") if not word.isdigit()]
        loaded = weights.loaded_weight(weight, config)
        if words[-1] == "wk":
            loaded = weights.effective_storage(weight, config)
        totals[".".join(words)] += weights.weight_bytes(weights.shard(loaded, layout), precision)
    return totals


def unstack(name):
    """The checkpoint modules of one SGLang parameter or scale."""
    name = name.removesuffix("_scale_inv").removesuffix(".weight").removesuffix(".bias")
    for stacked, parts in STACKED.items():
        if name.endswith(f".{stacked}"):
            return tuple(name.removesuffix(stacked) + part for part in parts)
    return (name,)


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def allocation(request, tmp_path_factory):
    content = TINY if request.param == "bf16" else TINY | FP8
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(content))
    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(LAYOUTS)],
        capture_output=True,
        text=True,
        timeout=300,
        # Stock classes are the subject here, so no plugin may replace them.
        env=os.environ | {"SGLANG_PLUGINS": "__none__", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    by_layout = dict(zip(LAYOUTS, json.loads(process.stdout.splitlines()[-1])))
    return content, request.param, by_layout


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_module_of_rank_zero(sizes, allocation):
    content, precision, by_layout = allocation
    tp_size, attn_dp_size, ep_size = sizes
    layout = ParallelLayout(tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size)
    planned = planned_bytes(content, precision, layout)
    allocated = collections.Counter()
    for name, size in by_layout[sizes].items():
        # Scalars of a per-tensor FP8 cache, which DSA rows with their own scales do not use.
        if not name.endswith((".k_scale", ".v_scale")):
            allocated[unstack(name)] += size
    assert {key: sum(planned.pop(part) for part in key) for key in allocated} == allocated
    assert not planned
