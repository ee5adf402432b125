"""A model whose MTP layer must predict exactly what the target predicts.

Every draft token of a correct implementation is accepted, at every draft position; a norm left out
or doubled, the wrong hidden state, a wrong head or a stale cache row brings rejections.

The residual stream has four parts: three codes of 64 channels, each +-1, and a rest of ones.

========  ==================================  =======================================
part      target, at token i                  MTP layer, at the row of token i + 1
========  ==================================  =======================================
current   code of token i (embedding)         code of token i + 1 (embedding, enorm)
previous  code of token i - 1 (layer 0)       the hidden state's ``current`` (hnorm)
oldest    code of token i - 2 (layer 0)       the hidden state's ``previous`` (hnorm),
                                              or the layer's own attention one row back
ones      constant inputs for the attention   the same
========  ==================================  =======================================

Layer 0's heads 0 and 1 attend to one position each, one and two tokens back: a constant query and
a constant key, rotated by RoPE, meet in phase at one distance only. The indexer scores distances in
the same way. All other branches write nothing. The output head reads three base-4 digits, one from
each code; the next token's live id is the one whose digits add up to 63, and the runner-up has 62,
so that BF16 and FP8 caches do not change it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.random_weights import draw_tensor
from sglang_glm.checkpoint.tensors import TensorSpec, iter_tensors

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec

CODE_WIDTH = 64
LIVE_TOKENS = 64
"""Only ids below this are ever generated; a prompt's other ids count modulo this."""

_CURRENT, _PREVIOUS, _OLDEST = (
    slice(CODE_WIDTH * part, CODE_WIDTH * (part + 1)) for part in range(3)
)
_ONE = 3 * CODE_WIDTH
"""First channel of the ones."""

_FREQUENCIES = 16
"""RoPE pairs used: enough that no other distance comes near being in phase."""
_AMPLITUDE = 32.0
"""Of query and key in each pair. Off by one position, the logit falls by about 70."""


def _codes() -> torch.Tensor:
    # Sylvester's construction: 64 orthogonal rows of +-1. [64, 64]
    code = torch.ones(1, 1)
    while len(code) < CODE_WIDTH:
        code = torch.cat([torch.cat([code, code], 1), torch.cat([code, -code], 1)])
    return code


def _digit_tables(spec: CheckpointSpec) -> torch.Tensor:
    # tables[part, t, x]: what code x in this part adds to the logit of live token t.
    source = TensorSpec(name="perfect_mtp.shifts", shape=(3, LIVE_TOKENS), kind="embedding")
    shifts = (draw_tensor(spec, source).float() * 1000).round().long() % 4
    token = torch.arange(LIVE_TOKENS)
    tables = []
    for part, weight in enumerate((16, 4, 1)):
        digit = token // weight % 4
        tables.append(weight * ((digit[:, None] + shifts[part][None, :]) % 4))
    return torch.stack(tables).float()


class _Builder:
    """Drawn weights to start from, and the tensors that replace some of them."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self.spec = spec
        self.table = {tensor.name: tensor for tensor in iter_tensors(spec)}
        self.built: dict[str, torch.Tensor] = {}

    def drawn(self, name: str) -> torch.Tensor:
        # The tensor as a reader will see it: already rounded to BF16.
        return draw_tensor(self.spec, self.table[name]).float()

    def zeros(self, name: str) -> torch.Tensor:
        self.built[name] = torch.zeros(self.table[name].shape)
        return self.built[name]

    def attention(
        self, prefix: str, *, norm: str, rms: float, reads: slice, lags: dict[int, slice]
    ) -> None:
        """Make head ``n`` copy ``reads`` of the row ``lag`` back into ``writes``.

        Args:
            prefix: Up to ``self_attn``.
            norm: Weight of the norm before.
            rms: Root mean square of the stream before that norm.
            reads: Channels copied.
            lags: Distance to channels written, one head each.
        """
        spec = self.spec
        before = self.drawn(norm) / rms  # what the norm multiplies each channel by

        q_a = self.zeros(f"{prefix}.q_a_proj.weight")
        q_a[0, _ONE] = 1 / before[_ONE]
        q_unit = math.sqrt(spec.q_lora_rank) * self.drawn(f"{prefix}.q_a_layernorm.weight")[0]

        kv_a = self.zeros(f"{prefix}.kv_a_proj_with_mqa.weight")
        channels = torch.arange(reads.start, reads.stop)
        kv_a[torch.arange(CODE_WIDTH), channels] = 1 / before[reads]
        kv_a[spec.kv_lora_rank :: 2, _ONE][:_FREQUENCIES] = _AMPLITUDE / before[_ONE]
        latent_unit = (
            math.sqrt(spec.kv_lora_rank / CODE_WIDTH)
            * self.drawn(f"{prefix}.kv_a_layernorm.weight")[:CODE_WIDTH]
        )

        q_b = self.zeros(f"{prefix}.q_b_proj.weight").view(
            spec.num_attention_heads, spec.qk_head_dim, spec.q_lora_rank
        )
        kv_b = self.zeros(f"{prefix}.kv_b_proj.weight").view(
            spec.num_attention_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank
        )
        o = self.zeros(f"{prefix}.o_proj.weight").view(
            spec.hidden_size, spec.num_attention_heads, spec.v_head_dim
        )
        code = torch.arange(CODE_WIDTH)
        for head, (lag, writes) in enumerate(lags.items()):
            rope = slice(spec.qk_nope_head_dim, spec.qk_nope_head_dim + 2 * _FREQUENCIES)
            q_b[head, rope, 0] = _AMPLITUDE * self.phases(lag) / q_unit
            kv_b[head, spec.qk_nope_head_dim + code, code] = 1 / latent_unit
            o[torch.arange(writes.start, writes.stop), head, code] = 1.0

        indexer = f"{prefix}.indexer"
        wq_b = self.zeros(f"{indexer}.wq_b.weight").view(
            spec.index_n_heads, spec.index_head_dim, spec.q_lora_rank
        )
        wq_b[:, : 2 * _FREQUENCIES, 0] = self.phases(min(lags)) / q_unit
        # A key that is the LayerNorm's bias alone, the same at every position before RoPE.
        self.zeros(f"{indexer}.k_norm.weight")
        self.zeros(f"{indexer}.k_norm.bias")[: 2 * _FREQUENCIES : 2] = 1.0
        self.zeros(f"{indexer}.weights_proj.weight")[:, _ONE] = 1 / before[_ONE]

    def phases(self, lag: int) -> torch.Tensor:
        # A query that meets the key (1, 0) in phase when the key is `lag` positions back. [32]
        pairs = self.spec.qk_rope_head_dim // 2
        angles = -lag * self.spec.rope_theta ** -(torch.arange(_FREQUENCIES) / pairs)
        return torch.stack([angles.cos(), angles.sin()], 1).flatten()


def build_perfect_mtp(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """Build the tensors that differ from the random ones.

    Args:
        spec: With ``mtp_perfect`` set.

    Returns:
        Name to tensor in the dtype that is stored.
    """
    build = _Builder(spec)
    hidden, ones = spec.hidden_size, slice(_ONE, spec.hidden_size)
    nextn = f"model.layers.{spec.num_hidden_layers}"
    codes = _codes()

    embedding = build.zeros("model.embed_tokens.weight")
    embedding[:, _CURRENT] = codes[torch.arange(spec.vocab_size) % LIVE_TOKENS]
    embedding[:, ones] = 1.0
    embedded_rms = math.sqrt((hidden - 2 * CODE_WIDTH) / hidden)

    for name in build.table:
        if name.endswith((".o_proj.weight", ".down_proj.weight")):
            build.zeros(name)
    build.attention(
        "model.layers.0.self_attn",
        norm="model.layers.0.input_layernorm.weight",
        rms=embedded_rms,
        reads=_CURRENT,
        lags={1: _PREVIOUS, 2: _OLDEST},
    )

    # With all four parts in place every channel is +-1 and the final norm is its weight.
    final = build.drawn("model.norm.weight")
    head = build.zeros("lm_head.weight")
    for part, table in zip((_CURRENT, _PREVIOUS, _OLDEST), _digit_tables(spec)):
        head[:LIVE_TOKENS, part] = table @ codes / CODE_WIDTH / final[part]

    # The draft's hidden state must look like the target's, which the next step is fed too.
    build.built[f"{nextn}.shared_head.norm.weight"] = final
    enorm = build.drawn(f"{nextn}.enorm.weight") / embedded_rms
    hnorm = build.drawn(f"{nextn}.hnorm.weight") * final / final.square().mean().sqrt()
    eh_proj = build.zeros(f"{nextn}.eh_proj.weight")
    copies = [(_CURRENT, _CURRENT, 0, enorm), (ones, ones, 0, enorm)]
    copies.append((_PREVIOUS, _CURRENT, hidden, hnorm))
    if spec.mtp_perfect == "hidden":
        copies.append((_OLDEST, _PREVIOUS, hidden, hnorm))
    for writes, reads, offset, scale in copies:
        rows = torch.arange(writes.start, writes.stop)
        eh_proj[rows, offset + torch.arange(reads.start, reads.stop)] = 1 / scale[reads]
    if spec.mtp_perfect == "attention":
        build.attention(
            f"{nextn}.self_attn",
            norm=f"{nextn}.input_layernorm.weight",
            rms=math.sqrt((hidden - CODE_WIDTH) / hidden),
            reads=_PREVIOUS,
            lags={1: _OLDEST},
        )
    for copy, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if f"{nextn}.{copy}.weight" in build.table:
            build.built[f"{nextn}.{copy}.weight"] = build.built[f"{source}.weight"]
    return {name: tensor.to(torch.bfloat16) for name, tensor in build.built.items()}


def next_live_token(spec: CheckpointSpec, tokens: list[int]) -> int:
    """What the constructed model predicts, from its definition.

    Args:
        spec: With ``mtp_perfect`` set.
        tokens: At least three token ids.

    Returns:
        The next token's id.
    """
    tables = _digit_tables(spec)
    recent = [token % LIVE_TOKENS for token in tokens[-1:-4:-1]]
    return int(sum(tables[part, :, code] for part, code in enumerate(recent)).argmax())
