"""A model whose MTP layer must predict exactly what the target predicts.

Every draft token of a correct implementation is accepted, at every draft position; a norm left out
or doubled, the wrong hidden state, a wrong head or a stale cache row brings rejections.

The target is that of ``trigram``. Row ``i`` of the MTP layer rebuilds the target's stream at token
``i + 1``: ``current`` and the ones from the embedding through ``enorm``; ``previous`` from the
``current`` part of the hidden state through ``hnorm``; ``oldest`` from its ``previous`` part or, in
the ``attention`` form, from the layer's own cache, one row back.

Without a script the target's text is a walk over 64 live ids: the head reads three base-4 digits,
one from each code. The live id whose digits add up to 63 wins and the runner-up has 62, a margin
that BF16 and FP8 caches do not change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.random_weights import draw_tensor
from sglang_glm.checkpoint.tensors import TensorSpec
from sglang_glm.checkpoint.trigram import CODE_WIDTH, CURRENT, OLDEST, ONE, PREVIOUS

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec
    from sglang_glm.checkpoint.trigram import TrigramBuilder

LIVE_TOKENS = 64
"""Only ids below this are ever generated; a prompt's other ids count modulo this."""


def digit_tables(spec: CheckpointSpec) -> torch.Tensor:
    """Make the head's tables of the walk.

    Args:
        spec: Gives the seed.

    Returns:
        ``[3, 64, 64]``, FP32; see ``TrigramBuilder.target``.
    """
    source = TensorSpec(name="perfect_mtp.shifts", shape=(3, LIVE_TOKENS), kind="embedding")
    shifts = (draw_tensor(spec, source).float() * 1000).round().long() % 4
    token = torch.arange(LIVE_TOKENS)
    tables = []
    for part, weight in enumerate((16, 4, 1)):
        digit = token // weight % 4
        tables.append(weight * ((digit[:, None] + shifts[part][None, :]) % 4))
    return torch.stack(tables).float()


def live_codes(spec: CheckpointSpec) -> torch.Tensor:
    """Give each token its code in the walk.

    Args:
        spec: Gives the vocabulary.

    Returns:
        ``[vocab_size]``, int64.
    """
    return torch.arange(spec.vocab_size) % LIVE_TOKENS


def next_live_token(spec: CheckpointSpec, tokens: list[int]) -> int:
    """What the walk continues with, from its definition.

    Args:
        spec: With ``mtp_perfect`` set and no script.
        tokens: At least three token ids.

    Returns:
        The next token's id.
    """
    tables = digit_tables(spec)
    recent = [token % LIVE_TOKENS for token in tokens[-1:-4:-1]]
    votes = torch.stack([tables[part, :, code] for part, code in enumerate(recent)])
    return int(votes.sum(0).argmax())


def build_perfect_mtp(build: TrigramBuilder) -> None:
    """Construct the MTP layer.

    Args:
        build: After ``target``; its spec has ``mtp_perfect`` set.
    """
    spec = build.spec
    hidden, ones = spec.hidden_size, slice(ONE, spec.hidden_size)
    nextn = f"model.layers.{spec.num_hidden_layers}"

    # The draft's hidden state must look like the target's, which the next step is fed too.
    final = build.drawn("model.norm.weight")
    build.built[f"{nextn}.shared_head.norm.weight"] = final
    enorm = build.drawn(f"{nextn}.enorm.weight") / build.embedded_rms
    hnorm = build.drawn(f"{nextn}.hnorm.weight") * final / final.square().mean().sqrt()
    eh_proj = build.zeros(f"{nextn}.eh_proj.weight")
    copies = [(CURRENT, CURRENT, 0, enorm), (ones, ones, 0, enorm)]
    copies.append((PREVIOUS, CURRENT, hidden, hnorm))
    if spec.mtp_perfect == "hidden":
        copies.append((OLDEST, PREVIOUS, hidden, hnorm))
    for writes, reads, offset, scale in copies:
        rows = torch.arange(writes.start, writes.stop)
        eh_proj[rows, offset + torch.arange(reads.start, reads.stop)] = 1 / scale[reads]
    if spec.mtp_perfect == "attention":
        build.attention(
            f"{nextn}.self_attn",
            norm=f"{nextn}.input_layernorm.weight",
            rms=math.sqrt((hidden - CODE_WIDTH) / hidden),
            reads=PREVIOUS,
            lags={1: OLDEST},
        )
