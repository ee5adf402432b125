"""Times: what bounds a term, and the kernel rates against the launches they were fitted to.

The measured launches are one H200's: DeepGEMM paged index scores, SGLang top-k v2 and FlashMLA
sparse decode, in microseconds, ten launches in a CUDA graph, median of seven replays.
"""

import pytest

from sglang_glm.planning import roofline, traffic
from sglang_glm.planning.hardware import GPUS, find_gpu
from sglang_glm.planning.released import load_config
from sglang_glm.planning.traffic import Term

GLM = load_config("zai-org/GLM-5.3")
H200 = find_gpu("h200")


def make_term(name="routed experts", hbm_bytes=0.0, flops=0.0, math="fp8", launches=0):
    return Term(name=name, hbm_bytes=hbm_bytes, flops=flops, math=math, launches=launches)


def index_scoring(context_tokens, num_requests, next_n):
    # Flattened rows: each of them reads its request's keys.
    rows = num_requests * next_n
    keys = rows * context_tokens
    return make_term(
        "index scoring", keys * (132 + 4), traffic.index_scoring_flops(GLM, keys), launches=1
    )


def topk(context_tokens, num_requests, next_n):
    return make_term(
        "top-k selection",
        4 * context_tokens * num_requests * next_n,
        math="none",
        launches=1,
    )


def sparse_attention(num_tokens):
    rows = 2048 * num_tokens
    flops = traffic.sparse_attention_flops(GLM, rows, 64)
    return make_term("sparse attention", 656 * rows, flops, "bf16", launches=1)


def expected_us(term, local_heads=64):
    rates = roofline.HOPPER_RATES
    return roofline.time_term(term, H200, rates, local_heads=local_heads).time_us


@pytest.mark.parametrize(
    ("context_tokens", "num_requests", "next_n", "measured_us"),
    [
        (8_192, 1, 1, 3.5),
        (32_768, 1, 1, 3.9),
        (32_768, 32, 1, 39.2),
        (131_072, 1, 1, 5.7),
        (131_072, 8, 1, 38.7),
        (131_072, 8, 6, 178.1),
        (131_072, 32, 1, 139.7),
        (131_072, 32, 6, 798.3),
        (1_048_576, 1, 1, 40.8),
        (1_048_576, 8, 6, 1461.7),
        (1_048_576, 32, 6, 6396),
    ],
)
def test_index_scoring_rate(context_tokens, num_requests, next_n, measured_us):
    term = index_scoring(context_tokens, num_requests, next_n)
    assert expected_us(term) == pytest.approx(measured_us, rel=0.2, abs=2.5)


@pytest.mark.parametrize(
    ("context_tokens", "num_requests", "next_n", "measured_us"),
    [
        (32_768, 1, 1, 11.0),
        (131_072, 1, 1, 8.5),
        (131_072, 32, 1, 21.1),
        (131_072, 8, 6, 29.9),
        (131_072, 32, 6, 62.8),
        (1_048_576, 8, 6, 125),
        (1_048_576, 32, 6, 575),
    ],
)
def test_topk_rate(context_tokens, num_requests, next_n, measured_us):
    # The measurements themselves do not grow evenly: 11.0 us at 32,768 keys, 8.5 at 131,072.
    term = topk(context_tokens, num_requests, next_n)
    assert expected_us(term) == pytest.approx(measured_us, rel=0.28)


@pytest.mark.parametrize(
    ("num_tokens", "measured_us"), [(1, 17.2), (8, 20.0), (32, 50.1), (64, 77.7), (192, 184.1)]
)
def test_sparse_attention_rate(num_tokens, measured_us):
    assert expected_us(sparse_attention(num_tokens)) == pytest.approx(measured_us, rel=0.25)
    ideal = roofline.time_term(
        sparse_attention(num_tokens), H200, roofline.IDEAL_RATES, local_heads=64
    )
    assert ideal.time_us < measured_us


def test_published_bounds_of_the_kernels():
    # Keys read once at 4.3 TB/s, and the arithmetic of six rows at 1,580 TFLOP/s.
    keys_us = 1e6 * 32 * 131_072 * 132 / H200.hbm_bytes_per_s
    assert keys_us == pytest.approx(128.8, rel=0.005)
    flops = traffic.index_scoring_flops(GLM, 32 * 6 * 131_072)
    assert 1e6 * flops / H200.fp8_flops_per_s == pytest.approx(130, rel=0.005)
    attention = sparse_attention(192)
    assert 1e6 * attention.hbm_bytes / H200.hbm_bytes_per_s == pytest.approx(60, rel=0.005)
    assert 1e6 * attention.flops / H200.bf16_flops_per_s == pytest.approx(69, rel=0.01)


def test_few_heads_are_padded():
    term = make_term("sparse attention", 0.0, 1e12, "bf16", launches=1)
    assert expected_us(term, local_heads=8) - 17 == pytest.approx(8 * (expected_us(term) - 17))
    ideal = roofline.time_term(term, H200, roofline.IDEAL_RATES, local_heads=8)
    assert ideal.time_us == pytest.approx(1e18 / 790e12)


@pytest.mark.parametrize(
    ("hbm_bytes", "flops", "math", "bound", "time_us"),
    [
        (4.3e9, 0.0, "fp8", "memory", 1000.0),
        (0.0, 1580e9, "fp8", "compute", 1000.0),
        (0.0, 1580e9, "bf16", "compute", 2000.0),
        (4.3e9, 790e9, "fp8", "memory", 1000.0),
        (4.3e9, 1e18, "none", "memory", 1000.0),
    ],
)
def test_roofline_takes_the_slower_side(hbm_bytes, flops, math, bound, time_us):
    got_us, got_bound = roofline.roofline_us(hbm_bytes, flops, math, H200)
    assert got_bound == bound
    assert got_us == pytest.approx(time_us)


def test_step_adds_up_and_names_the_slowest():
    terms = [make_term(hbm_bytes=4.3e9), make_term("LM head", hbm_bytes=4.3e6)]
    timed = roofline.time_step(
        terms,
        [],
        H200,
        roofline.HOPPER_RATES,
        local_heads=64,
        num_layers=10,
        gpus_per_node=8,
    )
    fixed = roofline.HOPPER_RATES.other_us_per_layer * 10 + roofline.HOPPER_RATES.other_us_per_pass
    assert roofline.total_us(timed) == pytest.approx(1001 + fixed)
    assert roofline.slowest(timed).name == "routed experts"


def test_rates_exist_only_where_kernels_were_measured():
    known = {name for name, gpu in GPUS.items() if roofline.known_rates(gpu) is not None}
    assert known == {"h100", "h200"}


def test_unknown_gpu():
    with pytest.raises(ValueError, match="expected one of h200, h100, b200"):
        find_gpu("a100")
