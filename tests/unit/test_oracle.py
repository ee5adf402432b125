"""The oracle is transformers, its notes about selections are true, and comparisons can fail.

test_equals_from_pretrained            our weight loading changes nothing, bit for bit
test_latent_norm_epsilon               rms_norm_eps reaches the two latent norms, and shows
test_chunks_equal_whole                the cache carries everything
test_selection_is_transformers         what we note is what transformers selected
test_indexer_by_hand                   einsum from raw weights: RoPE pairs, LayerNorm, scales
test_near_tie_*                        gap, magnitude, exact ties, -inf, the bound
test_greedy_is_argmax                  a continuation is its own argmax
test_every_part_shows                  seven wrong models, each far outside the truth's budget
test_formats_*                         rounding to each cache format, against loops
test_rounded_queries_path              the replaced selection equals transformers' unrounded
test_formats_move_logits               each format is applied at all
test_fp8_weights                       dequantised weights are what the oracle multiplies by
test_read_weights_refuses              missing files, missing scale
test_compare_*                         differences, excuses, NaN, top-k, misuse
test_parse_generate                    SGLang's answer, with and without the prompt's part
test_reference_cache                   the second run loads no model
test_load_config_refuses_half_split    the other RoPE pairing is refused by its field
test_bf16_model_keeps_the_router_bias  the router's bias stays FP32 in a BF16 model
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.writer import write_checkpoint
from sglang_glm.verification import oracle as oracle_module
from sglang_glm.verification.compare import (
    Comparison,
    ServerLogprobs,
    compare_logprobs,
    merge_comparisons,
    parse_generate,
)
from sglang_glm.verification.formats import (
    CacheFormats,
    round_bf16,
    round_index_fp8,
    round_latent_fp8,
)
from sglang_glm.verification.hf_weights import read_weights
from sglang_glm.verification.near_tie import (
    NEAR_TIE_BOUND,
    first_near_tie,
    head_scores,
    select_positions,
)
from sglang_glm.verification.oracle import Oracle, continuation
from sglang_glm.verification.prompts import ordinary_vocab, random_prompt
from sglang_glm.verification.reference_cache import ReferenceCache

if TYPE_CHECKING:
    from pathlib import Path

SPEC = CheckpointSpec(
    num_hidden_layers=4,
    first_k_dense_replace=1,
    indexer_types=("full", "shared", "full", "shared"),
    index_topk=8,
    num_nextn_predict_layers=1,
)
ROWS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("oracle") / "model"
    write_checkpoint(SPEC, directory)
    return directory


@pytest.fixture(scope="module")
def prompt(checkpoint: Path) -> list[int]:
    return random_prompt(ordinary_vocab(checkpoint), ROWS, seed=3)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def truth(oracle: Oracle, prompt: list[int]) -> oracle_module.OracleRun:
    return oracle.run(prompt, keep_hidden=True)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def test_equals_from_pretrained(checkpoint: Path, prompt: list[int]) -> None:
    run = Oracle(checkpoint, latent_norm_eps=1e-6).run(prompt, keep_hidden=True)
    model = GlmMoeDsaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    expected = torch.log_softmax(output.logits[0].double(), -1).float()
    assert torch.equal(run.logprobs, expected)
    # transformers reports the last layer's output after the final norm.
    assert torch.equal(run.hidden_states[:-1], torch.stack(output.hidden_states)[:-1, 0])
    assert torch.equal(run.final_hidden, output.hidden_states[-1][0])


def test_latent_norm_epsilon(
    checkpoint: Path, truth: oracle_module.OracleRun, prompt: list[int]
) -> None:
    unpatched = Oracle(checkpoint, latent_norm_eps=1e-6).run(prompt)
    assert largest(unpatched.logprobs, truth.logprobs) > 5e-5
    explicit = Oracle(checkpoint, latent_norm_eps=SPEC.rms_norm_eps).run(prompt)
    assert torch.equal(explicit.logprobs, truth.logprobs)


def test_chunks_equal_whole(
    oracle: Oracle, truth: oracle_module.OracleRun, prompt: list[int]
) -> None:
    session = oracle.session(keep_hidden=True)
    for start, stop in ((0, 1), (1, 7), (7, 8), (8, 41), (41, ROWS)):
        session.extend(prompt[start:stop])
    run = session.result()
    assert largest(run.logprobs, truth.logprobs) < 5e-6
    assert run.hidden_states.shape == truth.hidden_states.shape
    assert run.selections.keys() == truth.selections.keys()
    assert all(torch.equal(run.selections[i], truth.selections[i]) for i in run.selections)
    with pytest.raises(ValueError, match="expected at least one"):
        session.extend([])
    with pytest.raises(ValueError, match="1024"):
        session.extend([1024])


def test_selection_is_transformers(
    oracle: Oracle, truth: oracle_module.OracleRun, prompt: list[int]
) -> None:
    chosen: dict[int, torch.Tensor] = {}
    for layer in oracle.full_layers:
        oracle._indexer(layer).register_forward_hook(
            lambda module, _args, output: chosen.update({module.layer_idx: output[0]})
        )
    oracle.run(prompt)
    assert sorted(chosen) == [0, 2]
    for layer, selected in chosen.items():
        for row in range(ROWS):
            # transformers fills short rows with positions that its causal mask hides.
            expected = sorted(p for p in selected[row].tolist() if p <= row)
            noted = truth.selections[layer][row].tolist()
            assert noted == expected + [-1] * (SPEC.index_topk - len(expected))


def test_indexer_by_hand(checkpoint: Path, truth: oracle_module.OracleRun) -> None:
    weights = {
        name: tensor.double()
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }

    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + SPEC.rms_norm_eps).sqrt() * weight

    def rotate(x: torch.Tensor) -> torch.Tensor:
        # Dims (0, 1), (2, 3), ... of the first 64 are the real and imaginary parts of 32 numbers.
        pairs = torch.view_as_complex(x[..., :64].unflatten(-1, (32, 2)).contiguous())
        frequencies = SPEC.rope_theta ** -(torch.arange(32, dtype=torch.float64) / 32)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        turned = torch.einsum(
            "t...f,tf->t...f", pairs, torch.polar(torch.ones_like(angles), angles)
        )
        return torch.cat([torch.view_as_real(turned).flatten(-2), x[..., 64:]], -1)

    for layer in (0, 2):
        prefix = f"model.layers.{layer}"
        attention, indexer = f"{prefix}.self_attn", f"{prefix}.self_attn.indexer"
        x = rms_norm(
            truth.hidden_states[layer].double(), weights[f"{prefix}.input_layernorm.weight"]
        )
        q_latent = rms_norm(
            torch.einsum("th,rh->tr", x, weights[f"{attention}.q_a_proj.weight"]),
            weights[f"{attention}.q_a_layernorm.weight"],
        )
        q = torch.einsum(
            "tr,ndr->tnd", q_latent, weights[f"{indexer}.wq_b.weight"].unflatten(0, (32, 128))
        )
        k = torch.einsum("th,dh->td", x, weights[f"{indexer}.wk.weight"])
        centred = k - k.mean(-1, keepdim=True)
        k = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        k = k * weights[f"{indexer}.k_norm.weight"] + weights[f"{indexer}.k_norm.bias"]
        head_weights = torch.einsum("th,nh->tn", x, weights[f"{indexer}.weights_proj.weight"])
        scores = torch.einsum(
            "tn,tns->ts",
            head_weights / math.sqrt(32),
            torch.relu(torch.einsum("tnd,sd->tns", rotate(q), rotate(k)) / math.sqrt(128)),
        )
        for row in range(ROWS):
            kept = min(SPEC.index_topk, row + 1)
            best = sorted(range(row + 1), key=lambda s: (-float(scores[row, s]), s))[:kept]
            noted = [p for p in truth.selections[layer][row].tolist() if p >= 0]
            assert noted == sorted(best), (layer, row)


def test_near_tie_gap() -> None:
    # One row at position 3, two heads; scores 5, 4, 4 - 2^-20, -1.
    terms = torch.tensor([[[3.0, 1.0, 1.0, 1.0], [2.0, 3.0, 3.0 - 2.0**-20, -2.0]]])
    for topk, gap, kept in (
        (1, 1.0 / 5.0, [0]),
        (2, 2.0**-20 / 4.0, [0, 1]),
        (3, (5.0 - 2.0**-20) / 4.0, [0, 1, 2]),
    ):
        selection = select_positions(terms, topk, first_position=3)
        assert selection.positions[0].tolist() == kept
        assert float(selection.relative_gap[0]) == pytest.approx(gap, rel=1e-6)
    # 2^-22 is inside the bound of 2^-21.
    assert first_near_tie(select_positions(terms, 2, 3).relative_gap) == 0
    assert first_near_tie(select_positions(terms, 3, 3).relative_gap) is None
    whole = select_positions(terms, 4, first_position=3)
    assert whole.relative_gap.tolist() == [math.inf]
    assert whole.positions[0].tolist() == [0, 1, 2, 3]


def test_near_tie_hidden_positions_do_not_count() -> None:
    # The same five keys seen from positions 0..4; keys 1 and 3 tie with nothing visible before.
    terms = torch.tensor([1.0, 2.0, 3.0, 2.0, 0.0]).expand(5, 1, 5).clone()
    selection = select_positions(terms, 2, first_position=0)
    assert selection.positions.tolist() == [[0, -1], [0, 1], [1, 2], [1, 2], [1, 2]]
    assert selection.relative_gap[:2].tolist() == [math.inf, math.inf]
    assert float(selection.relative_gap[2]) == pytest.approx(0.5)
    # Row 3: positions 1 and 3 tie exactly; the lower one is kept and the tie is reported.
    assert selection.relative_gap[3:].tolist() == [0.0, 0.0]
    assert first_near_tie(selection.relative_gap) == 3


def test_near_tie_of_zeros() -> None:
    terms = torch.zeros(1, 3, 6)
    selection = select_positions(terms, 4, first_position=5)
    assert selection.positions.tolist() == [[0, 1, 2, 3]]
    assert selection.relative_gap.tolist() == [0.0]


def test_near_tie_bound_is_about_rounding() -> None:
    """FP32 scores of a float64 problem stray by less than the bound's magnitude allows."""
    torch.manual_seed(0)
    q, k, w = torch.randn(16, 32, 128), torch.randn(256, 128), torch.randn(16, 32)
    exact = w.double()[:, :, None] * torch.relu(
        torch.einsum("thd,sd->ths", q.double(), k.double()) * 128**-0.5
    )
    terms = head_scores(q, k, w)
    error = (terms.sum(1).double() - exact.sum(1)).abs() / exact.abs().sum(1)
    assert 2.0**-26 < float(error.max()) < NEAR_TIE_BOUND


def test_greedy_is_argmax(oracle: Oracle, prompt: list[int]) -> None:
    run = oracle.greedy(prompt[:5], 12)
    added = continuation(run, 5)
    assert len(added) == 12 and len(run.token_ids) == 5 + 11
    again = oracle.run(prompt[:5] + added)
    assert again.logprobs[4:-1].argmax(-1).tolist() == added
    assert torch.equal(again.token_ids[:-1], run.token_ids)
    assert run.token_logprobs().shape == (15,)
    assert float(run.token_logprobs()[-1]) == pytest.approx(float(run.top(1)[0][-2, 0]))


def zero_head_weights(model: GlmMoeDsaForCausalLM) -> None:
    for layer in (0, 2):
        model.model.layers[layer].self_attn.indexer.weights_proj.weight.data.zero_()


def drop_router_bias(model: GlmMoeDsaForCausalLM) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.zero_()


def drop_routed_scaling(model: GlmMoeDsaForCausalLM) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.routed_scaling_factor = 1.0


def drop_shared_expert(model: GlmMoeDsaForCausalLM) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.shared_experts.down_proj.weight.data.zero_()


def drop_index_key_bias(model: GlmMoeDsaForCausalLM) -> None:
    for layer in (0, 2):
        model.model.layers[layer].self_attn.indexer.k_norm.bias.data.zero_()


def half_split_index_rope(model: GlmMoeDsaForCausalLM) -> None:
    # Rotating in the half-split layout equals permuting what is rotated interleaved.
    order = torch.arange(64).view(2, 32).T.flatten()
    for layer in (0, 2):
        indexer = model.model.layers[layer].self_attn.indexer
        heads = indexer.wq_b.weight.data.view(32, 128, -1)
        heads[:, :64] = heads[:, order].clone()
        for tensor in (indexer.wk.weight, indexer.k_norm.weight, indexer.k_norm.bias):
            tensor.data[:64] = tensor.data[order].clone()


def half_split_attention_rope(model: GlmMoeDsaForCausalLM) -> None:
    order = torch.arange(64).view(2, 32).T.flatten()
    for layer in model.model.layers:
        heads = layer.self_attn.q_b_proj.weight.data.view(SPEC.num_attention_heads, -1, 128)
        heads[:, 64:] = heads[:, 64 + order].clone()
        latent = layer.self_attn.kv_a_proj_with_mqa.weight.data
        latent[512:] = latent[512 + order].clone()


@pytest.mark.parametrize(
    "break_model",
    [
        zero_head_weights,
        drop_router_bias,
        drop_routed_scaling,
        drop_shared_expert,
        drop_index_key_bias,
        half_split_index_rope,
        half_split_attention_rope,
    ],
)
def test_every_part_shows(
    checkpoint: Path,
    prompt: list[int],
    truth: oracle_module.OracleRun,
    break_model,
) -> None:
    broken = Oracle(checkpoint)
    break_model(broken.model)
    run = broken.run(prompt)
    # A thousand times the budget of 1e-5, on most rows whose context passes index_topk.
    moved = (run.logprobs - truth.logprobs).abs().amax(-1)[2 * SPEC.index_topk :]
    assert float(moved.median()) > 1e-2


def test_formats_round_bf16() -> None:
    assert round_bf16(torch.tensor([1.0 + 2.0**-9, 1.0 + 2.0**-7])).tolist() == [1.0, 1.0078125]


def test_formats_latent_fp8() -> None:
    torch.manual_seed(0)
    latent = torch.randn(5, 512) * torch.tensor([1e-3, 1.0, 1.0, 100.0]).repeat_interleave(128)
    latent[2, 128:256] = 0
    rounded = round_latent_fp8(latent)
    for row in range(5):
        for group in range(4):
            values = latent[row, group * 128 : (group + 1) * 128]
            scale = float(values.abs().max()) / 448
            got = rounded[row, group * 128 : (group + 1) * 128]
            if scale == 0:
                assert not got.any()
                continue
            grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            grid = grid[grid.isfinite()] * scale
            distance = (values[:, None] - grid[None, :]).abs().amin(1)
            assert bool(((got - values).abs() <= distance * (1 + 1e-5) + 1e-12).all())
    with pytest.raises(ValueError, match="multiple of 128"):
        round_latent_fp8(torch.zeros(1, 100))


def test_formats_index_fp8() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 128) * torch.logspace(-8, 3, 64)[:, None]
    x[0] = 0
    x[1, 0], x[1, 1:] = 448.0, 0  # amax / 448 is exactly 1: the scale must not double
    rounded = round_index_fp8(x)
    for row in range(64):
        scale = 2.0 ** math.ceil(math.log2(max(float(x[row].abs().max()), 1e-4) / 448))
        expected = (x[row] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(rounded[row], expected)
    assert torch.equal(round_index_fp8(rounded), rounded)
    assert float(rounded[1, 0]) == 448.0


def test_formats_are_checked() -> None:
    with pytest.raises(ValueError, match="index_key is 'int8'"):
        CacheFormats(index_key="int8")


def test_rounded_queries_path(
    checkpoint: Path, prompt: list[int], truth: oracle_module.OracleRun
) -> None:
    replaced = Oracle(checkpoint)
    for layer in replaced.full_layers:
        oracle_module._round_queries(replaced._indexer(layer), CacheFormats())
    run = replaced.run(prompt)
    assert largest(run.logprobs, truth.logprobs) < 5e-6


@pytest.mark.parametrize(
    "formats",
    [
        CacheFormats(latent="bf16"),
        CacheFormats(latent="fp8"),
        CacheFormats(index_key="bf16"),
        CacheFormats(index_key="fp8"),
        CacheFormats(index_query="fp8"),
    ],
)
def test_formats_move_logits(
    checkpoint: Path,
    prompt: list[int],
    truth: oracle_module.OracleRun,
    formats: CacheFormats,
) -> None:
    run = Oracle(checkpoint, formats=formats).run(prompt)
    assert largest(run.logprobs, truth.logprobs) > 1e-5
    if formats.latent == "fp32":
        # Within index_topk everything is selected and no index format matters.
        early = SPEC.index_topk
        assert largest(run.logprobs[:early], truth.logprobs[:early]) < 5e-6
    else:
        assert torch.equal(run.selections[0], truth.selections[0])


def test_fp8_weights(tmp_path: Path, prompt: list[int], truth: oracle_module.OracleRun) -> None:
    quantized = dataclasses.replace(SPEC, fp8=True)
    write_checkpoint(quantized, tmp_path / "fp8")
    weights = read_weights(tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # 576 rows: a partial block
    scale = stored[f"{name}_scale_inv"]
    for row, column in ((0, 0), (127, 255), (128, 128), (575, 200)):
        expected = stored[name][row, column].float() * scale[row // 128, column // 128]
        assert float(weights[name][row, column]) == float(expected)
    run = Oracle(tmp_path / "fp8").run(prompt)
    assert 1e-3 < largest(run.logprobs, truth.logprobs) < 2.0


def test_read_weights_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor an index"):
        read_weights(tmp_path)
    save_file(
        {"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"a\.weight_scale_inv is missing"):
        read_weights(tmp_path)


def answers(run: oracle_module.OracleRun, offset: float = 0.0, top: int = 3) -> ServerLogprobs:
    rows = torch.arange(len(run.token_ids) - 1)
    values, ids = run.top(top)
    return ServerLogprobs(
        rows=rows,
        token_ids=run.token_ids[1:],
        token_logprobs=run.token_logprobs() + offset,
        top_ids=ids[rows],
        top_logprobs=values[rows] + offset,
    )


def test_compare_agrees_and_differs(truth: oracle_module.OracleRun) -> None:
    same = compare_logprobs(answers(truth), truth.logprobs, truth.token_ids)
    assert same.compared == ROWS - 1 and same.max_diff == 0 and same.max_top_loss == 0
    assert same.failures(max_diff=0.0, max_excused_fraction=0.0) == []

    off = compare_logprobs(answers(truth, offset=2e-3), truth.logprobs, truth.token_ids)
    assert off.max_diff == pytest.approx(2e-3, rel=1e-2)
    (failure,) = off.failures(max_diff=1e-3, max_excused_fraction=0.0)
    assert "max |dlogp| 2.0" in failure and "row " in failure
    assert off.failures(max_diff=3e-3, max_excused_fraction=0.0) == []

    one = answers(truth)
    one.top_logprobs[17, 2] -= 0.25
    single = compare_logprobs(one, truth.logprobs, truth.token_ids)
    assert single.max_diff == pytest.approx(0.25) and single.worst.startswith("row 17,")


def test_compare_excuses_after_the_tie(truth: oracle_module.OracleRun) -> None:
    late = answers(truth)
    late.token_logprobs[40:] += 1.0
    excused = compare_logprobs(late, truth.logprobs, truth.token_ids, first_near_tie=40)
    assert excused.compared == 40 and excused.excused == ROWS - 1 - 40
    assert excused.max_diff == 0 and excused.max_excused_diff == pytest.approx(1.0)
    assert excused.failures(max_diff=1e-5, max_excused_fraction=0.5) == []
    (failure,) = excused.failures(max_diff=1e-5, max_excused_fraction=0.02)
    assert "19 of 59 entries excused" in failure
    early = compare_logprobs(late, truth.logprobs, truth.token_ids, first_near_tie=41)
    assert early.max_diff == pytest.approx(1.0)
    nothing = compare_logprobs(late, truth.logprobs, truth.token_ids, first_near_tie=0)
    assert "nothing was compared" in nothing.failures(max_diff=1.0, max_excused_fraction=1.0)[0]


def test_compare_fails_on_nan(truth: oracle_module.OracleRun) -> None:
    broken = answers(truth)
    broken.token_logprobs[3] = float("nan")
    comparison = compare_logprobs(broken, truth.logprobs, truth.token_ids)
    assert math.isnan(comparison.max_diff) and comparison.worst.startswith("row 3,")
    assert comparison.failures(max_diff=10.0, max_excused_fraction=0.0)
    good = compare_logprobs(answers(truth), truth.logprobs, truth.token_ids)
    for order in ([broken, good], [good, broken]):
        merged = merge_comparisons(
            part if isinstance(part, Comparison) else comparison for part in order
        )
        assert math.isnan(merged.max_diff) and merged.worst.startswith("row 3,")


def test_compare_finds_a_wrong_top_list(truth: oracle_module.OracleRun) -> None:
    # The right log-probabilities of the wrong tokens: ranks 2..4 instead of 1..3.
    values, ids = truth.top(4)
    rows = torch.arange(ROWS - 1)
    wrong = dataclasses.replace(
        answers(truth), top_ids=ids[rows, 1:], top_logprobs=values[rows, 1:]
    )
    comparison = compare_logprobs(wrong, truth.logprobs, truth.token_ids)
    assert comparison.max_diff == 0
    (failure,) = comparison.failures(max_diff=1e-5, max_excused_fraction=0.0)
    assert "less likely than the rank allows" in failure


def test_compare_refuses_misuse(truth: oracle_module.OracleRun) -> None:
    other = truth.token_ids.clone()
    other[9] += 1
    with pytest.raises(ValueError, match="token 9 differs"):
        compare_logprobs(answers(truth), truth.logprobs, other)
    with pytest.raises(ValueError, match="oracle's 10 rows"):
        compare_logprobs(answers(truth), truth.logprobs[:10], truth.token_ids)
    with pytest.raises(ValueError, match="at least one"):
        merge_comparisons([])


def test_parse_generate() -> None:
    output = {
        "output_token_logprobs": [[-1.5, 7, None], [-0.5, 8, None]],
        "output_top_logprobs": [
            [[-1.0, 3, None], [-1.5, 7, None]],
            [[-0.5, 8, None], [-2.0, 1, None]],
        ],
    }
    only_output = parse_generate(output, prompt_length=4)
    assert only_output.rows.tolist() == [3, 4]
    assert only_output.token_ids.tolist() == [7, 8]
    assert only_output.top_ids.tolist() == [[3, 7], [8, 1]]

    prompt = {
        "input_token_logprobs": [[None, 5, None], [-2.0, 6, None], [-3.0, 9, None]],
        "input_top_logprobs": [None, [[-1.0, 2, None]], [[-1.1, 4, None]]],
    }
    whole = parse_generate({**output, **prompt}, prompt_length=4)
    assert whole.rows.tolist() == [1, 2, 3, 4]
    assert whole.token_ids.tolist() == [6, 9, 7, 8]
    assert whole.top_ids.tolist() == [[2], [4], [3], [8]]
    assert whole.token_logprobs.tolist() == [-2.0, -3.0, -1.5, -0.5]

    bare = parse_generate({"output_token_logprobs": [[-1.5, 7, None]]}, prompt_length=1)
    assert bare.top_ids.shape == (1, 0) and bare.rows.tolist() == [0]
    with pytest.raises(ValueError, match="return_logprob"):
        parse_generate({}, prompt_length=1)


def test_reference_cache(
    checkpoint: Path,
    prompt: list[int],
    truth: oracle_module.OracleRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = ReferenceCache(checkpoint, tmp_path)
    run, greedy = first.run(prompt), first.greedy(prompt[:4], 3)
    assert torch.equal(run.logprobs, truth.logprobs)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the model was loaded again")

    monkeypatch.setattr("sglang_glm.verification.reference_cache.Oracle", refuse)
    second = ReferenceCache(checkpoint, tmp_path)
    again = second.run(prompt)
    assert torch.equal(again.logprobs, run.logprobs)
    assert torch.equal(again.relative_gap, run.relative_gap)
    assert torch.equal(again.selections[2], run.selections[2])
    assert continuation(second.greedy(prompt[:4], 3), 4) == continuation(greedy, 4)
    for miss in (
        lambda: second.run(prompt[:-1]),
        lambda: second.greedy(prompt[:4], 2),
        lambda: ReferenceCache(checkpoint, tmp_path, formats=CacheFormats(latent="bf16")).run(
            prompt
        ),
    ):
        with pytest.raises(AssertionError, match="loaded again"):
            miss()


def test_load_config_refuses_half_split(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "indexer_rope_interleave": False}))
    with pytest.raises(ValueError, match="indexer_rope_interleave is false"):
        oracle_module.load_config(tmp_path)


def test_bf16_model_keeps_the_router_bias(checkpoint: Path, prompt: list[int]) -> None:
    model = Oracle(checkpoint, dtype=torch.bfloat16).model
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    reference = GlmMoeDsaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
    )
    oracle_module.set_latent_norm_eps(reference, SPEC.rms_norm_eps)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0]
    run = Oracle(checkpoint, dtype=torch.bfloat16).run(prompt)
    assert torch.equal(run.logprobs, torch.log_softmax(logits.double(), -1).float())
    assert isinstance(model.model.rotary_emb, hf.GlmMoeDsaRotaryEmbedding)
