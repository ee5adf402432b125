"""Weight bytes per GPU against the parameters SGLang's own model class creates for rank 0."""

import collections
import importlib.util
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
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
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
LAYOUTS = [(1, 1, 1), (8, 1, 1), (8, 1, 4), (8, 1, 8), (8, 2, 8), (8, 8, 8), (8, 8, 1)]

# Modules that SGLang stacks, by the suffix of its parameter.
STACKED = {
    "experts.w13_weight": ("experts.gate_proj", "experts.up_proj"),
    "experts.w2_weight": ("experts.down_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
}


def planned_bytes(layout):
    config = GlmDsaConfig.from_hf(TINY)
    totals = collections.Counter()
    for weight in weights.iter_weights(config, with_mtp=False):
        words = [word for word in weight.name.split(".") if not word.isdigit()]
        local = weights.shard(weights.loaded_weight(weight, config), layout)
        totals[".".join(words)] += weights.weight_bytes(local, "bf16")
    return totals


def unstack(name):
    name = name.removesuffix(".weight").removesuffix(".bias")
    for stacked, parts in STACKED.items():
        if name.endswith(f".{stacked}"):
            return [name.removesuffix(stacked) + part for part in parts]
    return [name]


@pytest.fixture(scope="module")
def allocated_bytes(tmp_path_factory):
    for package in ("sglang", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
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
    return dict(zip(LAYOUTS, json.loads(process.stdout.splitlines()[-1])))


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_module_of_rank_zero(sizes, allocated_bytes):
    tp_size, attn_dp_size, ep_size = sizes
    planned = planned_bytes(
        ParallelLayout(tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size)
    )
    remaining = collections.Counter()
    for name, size in allocated_bytes[sizes].items():
        parts = unstack(name)
        if len(parts) == 1:
            remaining[parts[0]] += size
        else:
            assert sum(planned.pop(part) for part in parts) == size, name
    assert remaining == planned
