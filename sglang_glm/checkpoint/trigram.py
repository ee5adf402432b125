"""A target that looks its next token up by the last three, built from GLM's own parts.

The residual stream has four parts: three codes of 64 channels, each +-1, and a rest of ones.

========  ===============================  ==================================
part      holds, at token i                written by
========  ===============================  ==================================
current   the code of token i              the embedding
previous  the code of token i - 1          layer 0, head 0
oldest    the code of token i - 2          layer 0, head 1
ones      constant inputs for attention    the embedding
========  ===============================  ==================================

Heads 0 and 1 attend to one position each: a constant query and a constant key, rotated by RoPE,
meet in phase at one distance only. The indexer scores distances in the same way. All other branches
write nothing. Codes are orthogonal, so the output head can add any number for any code in any part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.random_weights import draw_tensor
from sglang_glm.checkpoint.tensors import iter_tensors

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec

CODE_WIDTH = 64
"""Channels of a code, and number of codes."""

CURRENT, PREVIOUS, OLDEST = (slice(CODE_WIDTH * part, CODE_WIDTH * (part + 1)) for part in range(3))
ONE = 3 * CODE_WIDTH
"""First channel of the ones."""

_FREQUENCIES = 16
"""RoPE pairs used: enough that no other distance comes near being in phase."""
_AMPLITUDE = 32.0
"""Of query and key in each pair. Off by one position, the logit falls by about 70."""


def hadamard_codes() -> torch.Tensor:
    """Make the codes, by Sylvester's construction.

    Returns:
        ``[64, 64]``, FP32, +-1; rows are orthogonal.
    """
    code = torch.ones(1, 1)
    while len(code) < CODE_WIDTH:
        code = torch.cat([torch.cat([code, code], 1), torch.cat([code, -code], 1)])
    return code


class TrigramBuilder:
    """Replaces some of a checkpoint's drawn tensors by constructed ones.

    Attributes:
        spec: The checkpoint.
        table: Its tensors by name.
        built: The replacements made so far, FP32.
    """

    def __init__(self, spec: CheckpointSpec) -> None:
        self.spec = spec
        self.table = {tensor.name: tensor for tensor in iter_tensors(spec)}
        self.built: dict[str, torch.Tensor] = {}

    def drawn(self, name: str) -> torch.Tensor:
        """Draw a tensor that stays random.

        Args:
            name: Its name.

        Returns:
            The values that a reader will see, already rounded to BF16, in FP32.
        """
        return draw_tensor(self.spec, self.table[name]).float()

    def zeros(self, name: str) -> torch.Tensor:
        """Replace a tensor by zeros.

        Args:
            name: Its name.

        Returns:
            The zeros, to be filled in place.
        """
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
        q_a[0, ONE] = 1 / before[ONE]
        q_unit = math.sqrt(spec.q_lora_rank) * self.drawn(f"{prefix}.q_a_layernorm.weight")[0]

        kv_a = self.zeros(f"{prefix}.kv_a_proj_with_mqa.weight")
        channels = torch.arange(reads.start, reads.stop)
        kv_a[torch.arange(CODE_WIDTH), channels] = 1 / before[reads]
        kv_a[spec.kv_lora_rank :: 2, ONE][:_FREQUENCIES] = _AMPLITUDE / before[ONE]
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
            q_b[head, rope, 0] = _AMPLITUDE * self._phases(lag) / q_unit
            kv_b[head, spec.qk_nope_head_dim + code, code] = 1 / latent_unit
            o[torch.arange(writes.start, writes.stop), head, code] = 1.0

        indexer = f"{prefix}.indexer"
        wq_b = self.zeros(f"{indexer}.wq_b.weight").view(
            spec.index_n_heads, spec.index_head_dim, spec.q_lora_rank
        )
        wq_b[:, : 2 * _FREQUENCIES, 0] = self._phases(min(lags)) / q_unit
        # A key that is the LayerNorm's bias alone, the same at every position before RoPE.
        self.zeros(f"{indexer}.k_norm.weight")
        self.zeros(f"{indexer}.k_norm.bias")[: 2 * _FREQUENCIES : 2] = 1.0
        self.zeros(f"{indexer}.weights_proj.weight")[:, ONE] = 1 / before[ONE]

    def _phases(self, lag: int) -> torch.Tensor:
        # A query that meets the key (1, 0) in phase when the key is `lag` positions back. [32]
        pairs = self.spec.qk_rope_head_dim // 2
        angles = -lag * self.spec.rope_theta ** -(torch.arange(_FREQUENCIES) / pairs)
        return torch.stack([angles.cos(), angles.sin()], 1).flatten()

    def target(self, codes_of_tokens: torch.Tensor, tables: torch.Tensor) -> None:
        """Make the target a table lookup.

        Args:
            codes_of_tokens: ``[vocab_size]``, int64 in ``[0, 64)``. Each token's code.
            tables: ``[3, tokens, 64]``. What a code in the current, previous and oldest part adds
                to the logit of each of the first ``tokens`` ids; other ids have logit 0.
        """
        codes = hadamard_codes()
        embedding = self.zeros("model.embed_tokens.weight")
        embedding[:, CURRENT] = codes[codes_of_tokens]
        embedding[:, ONE:] = 1.0
        for name in self.table:
            if name.endswith((".o_proj.weight", ".down_proj.weight")):
                self.zeros(name)
        self.attention(
            "model.layers.0.self_attn",
            norm="model.layers.0.input_layernorm.weight",
            rms=self.embedded_rms,
            reads=CURRENT,
            lags={1: PREVIOUS, 2: OLDEST},
        )
        # With all four parts in place every channel is +-1 and the final norm is its weight.
        final = self.drawn("model.norm.weight")
        head = self.zeros("lm_head.weight")
        for part, table in zip((CURRENT, PREVIOUS, OLDEST), tables):
            head[: table.shape[0], part] = table @ codes / CODE_WIDTH / final[part]

    @property
    def embedded_rms(self) -> float:
        """Root mean square of an embedding, whose middle parts are still empty."""
        return math.sqrt((self.spec.hidden_size - 2 * CODE_WIDTH) / self.spec.hidden_size)
