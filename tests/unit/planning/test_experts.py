"""Experts hit: the formula against enumeration, and the histogram's file format."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_glm.planning.experts import (
    MeasuredHistogram,
    RecordedHits,
    UniformRouting,
    expected_experts_hit,
)
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config

GLM = load_config("zai-org/GLM-5.3")
EP8 = ParallelLayout(tp_size=8, ep_size=8)


def test_formula_equals_enumeration():
    probabilities = [0.5, 0.25, 0.125, 0.125]
    expected = 0.0
    for choice in itertools.product(range(4), repeat=3):
        weight = 1.0
        for expert in choice:
            weight *= probabilities[expert]
        expected += weight * len(set(choice))
    assert expected_experts_hit(probabilities, 3) == pytest.approx(expected)


@given(tokens=st.integers(1, 10_000))
def test_bounds(tokens):
    hit = UniformRouting().experts_hit_per_gpu(GLM, ParallelLayout(), 3, tokens)
    assert 8 - 1e-9 <= hit <= 256
    more = UniformRouting().experts_hit_per_gpu(GLM, ParallelLayout(), 3, tokens + 1)
    assert more >= hit


def test_uniform_splits_over_ep():
    whole = UniformRouting().experts_hit_per_gpu(GLM, ParallelLayout(), 3, 32)
    assert UniformRouting().experts_hit_per_gpu(GLM, EP8, 3, 32) == pytest.approx(whole / 8)


def test_recorded_hits_are_used_as_they_are():
    assert RecordedHits(40).experts_hit_per_gpu(GLM, EP8, 3, 1) == 5
    assert RecordedHits(256).experts_hit_per_gpu(GLM, EP8, 3, 1) == 32
    assert RecordedHits(40).token_share_per_gpu(GLM, EP8, 3) == 1 / 8


def test_even_histogram_equals_uniform():
    histogram = MeasuredHistogram({3: (7,) * 256})
    for layer_id in (3, 40):
        assert histogram.experts_hit_per_gpu(GLM, EP8, layer_id, 32) == pytest.approx(
            UniformRouting().experts_hit_per_gpu(GLM, EP8, layer_id, 32)
        )
    assert histogram.token_share_per_gpu(GLM, EP8, 3) == pytest.approx(1 / 8)


def test_skew_lowers_the_hits_and_loads_one_gpu():
    skewed = MeasuredHistogram({3: (100,) * 8 + (0,) * 248})
    assert skewed.experts_hit_per_gpu(GLM, ParallelLayout(), 3, 1000) == pytest.approx(8)
    assert skewed.token_share_per_gpu(GLM, EP8, 3) == pytest.approx(1.0)


def test_layers_without_counts_take_the_mean():
    first, second = (2,) * 128 + (0,) * 128, (0,) * 128 + (6,) * 128
    histogram = MeasuredHistogram({3: first, 4: second})
    assert histogram.experts_hit_per_gpu(GLM, ParallelLayout(), 50, 10) == pytest.approx(
        UniformRouting().experts_hit_per_gpu(GLM, ParallelLayout(), 50, 10)
    )


def test_file_format(tmp_path):
    path = tmp_path / "hits.json"
    path.write_text(json.dumps({"3": list(range(256))}))
    assert MeasuredHistogram.from_json(path, GLM).counts == {3: tuple(range(256))}
    for content in ({"3": [1, 2]}, {"3": [0] * 256}, {"3": [-1] + [1] * 255}, {"3": "x"}):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="expert counts of layer 3"):
            MeasuredHistogram.from_json(path, GLM)
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no layers"):
        MeasuredHistogram.from_json(path, GLM)
