"""Checkpoints whose MTP layer predicts well, always or never, so that drafts are really accepted.

A random MTP layer is right once in a vocabulary: with one, no test would see an accepted draft.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = dict[str, torch.Tensor]


def rewrite(source: str, name: str, change: Callable[[Tensors, dict], None]) -> str:
    """A sibling of the checkpoint `source` whose tensors went through `change`."""
    directory = Path(source).parent / name
    partial = directory.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    # Without the manifest nothing takes the copy for what the writer made.
    (partial / "sglang_glm_checkpoint.json").unlink()
    config = json.loads((partial / "config.json").read_text())
    tensors = load_file(partial / "model.safetensors")
    change(tensors, config)
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "model.safetensors")}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    return str(directory)


#: A layer with an indexer and experts, as the MTP layer has.
_COPIED = "model.layers.2."
#: Weight of the hidden state beside the embedding in the MTP layer's input.
_HIDDEN_SHARE = 0.25
#: Factor on the attention output of the copied layer, which is too small in a random model to tell
#: one selection from another.
_ATTENTION_GAIN = 3.0


@functools.cache
def aligned(index_topk: int) -> str:
    """A random target in which one layer matters most, and an MTP layer that is a copy of that one.

    Both start from nearly the same and end in the same norm and head, so that many drafts are
    right; which ones are depends on the attention, the selection and the hidden state of either.

    Args:
        index_topk: Of both.
    """
    source = checkpoint("--mtp", "--index-topk", str(index_topk))

    def change(tensors: Tensors, config: dict) -> None:
        hidden, layer = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
        eye = torch.eye(hidden)
        tensors[f"{layer}.eh_proj.weight"] = torch.cat([eye, _HIDDEN_SHARE * eye], 1).bfloat16()
        tensors[f"{layer}.enorm.weight"].fill_(1.0)
        tensors[f"{layer}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        tensors[f"{_COPIED}self_attn.o_proj.weight"] *= _ATTENTION_GAIN
        for key in [key for key in tensors if key.startswith(_COPIED)]:
            tensors[f"{layer}.{key.removeprefix(_COPIED)}"] = tensors[key].clone()

    return rewrite(source, f"aligned-{index_topk}", change)


#: Tokens from here on are drafted wrongly on purpose by `counting`.
COUNTING_VOCAB = 512
NEVER_FROM = 448


def successor(token: int) -> int:
    """The token that the target of `counting` says after `token`."""
    if token < NEVER_FROM:
        return (token + 1) % NEVER_FROM
    return NEVER_FROM + (token - NEVER_FROM + 1) % (COUNTING_VOCAB - NEVER_FROM)


def ring(start: int, length: int) -> list[int]:
    """What the target of `counting` says, from `start` on."""
    tokens = [start]
    while len(tokens) < length:
        tokens.append(successor(tokens[-1]))
    return tokens


@functools.cache
def counting(*, own_head: bool = False) -> str:
    """A target that counts, and an MTP layer that foresees it below `NEVER_FROM` and never above.

    The next token is the present one plus one, each of the two ranges being a ring. A token is coded
    twice in the residual stream, and of each code alone a wrong token (a decoy) scores higher than
    the right one. The MTP layer takes one code from the embedding and the other from the hidden
    state, which it has to turn by one token: so its drafts are right only where both arrive, with
    the norms that they should have had.

    Args:
        own_head: Give the MTP layer an embedding and a head of its own which it cannot do without.
    """
    options = ("--mtp-embed-tokens", "--mtp-shared-head") if own_head else ()
    source = checkpoint("--mtp", "--vocab-size", str(COUNTING_VOCAB), "--layers", "4", *options)
    name = f"counting{'-own-head' if own_head else ''}"
    return rewrite(source, name, functools.partial(_count, own_head=own_head))


def _count(tensors: Tensors, config: dict, *, own_head: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = f"model.layers.{config['num_hidden_layers']}"
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    a, b, c = slice(0, 96), slice(96, 192), slice(192, 256)
    code, turn = _ring_codes(96, generator)

    def signs() -> torch.Tensor:
        # As norm weights: a state that missed its norm is scrambled beyond use.
        return 2.0 * torch.randint(2, (256,), generator=generator) - 1

    norm, enorm, hnorm = signs(), 1.5 * signs(), 0.5 * signs()
    embed = torch.zeros(COUNTING_VOCAB, 256)
    embed[:, a], embed[:, b] = code, code
    after = torch.arange(COUNTING_VOCAB) - 1
    after[0], after[NEVER_FROM] = NEVER_FROM - 1, COUNTING_VOCAB - 1
    head = torch.zeros(COUNTING_VOCAB, 256)
    head[:, a] = code[after] + 1.3 * code[_decoy(after, 7)]
    head[:, b] = code[after] + 1.3 * code[_decoy(after, 20)]
    # The target's state is zero here; only an MTP layer with an embedding of its own has more.
    head[:, c] = torch.randn(COUNTING_VOCAB, 64, generator=generator)
    head = head / norm

    own_embed = embed.clone()
    own_embed[:, a] = -code
    own_embed[:, c] = 0.125
    sign = -1.0 if own_head else 1.0
    project = torch.zeros(256, 512)
    project[a, a] = sign * torch.eye(96)
    if own_head:
        project[c, c] = torch.eye(64)
    project[:, :256] /= enorm
    project[b, 256:][:, b] = turn
    project[:, 256:] /= norm * hnorm
    own = head.clone()
    own[:, c] = 0.0

    tensors["model.embed_tokens.weight"] = embed
    tensors["lm_head.weight"] = 8 * head
    tensors["model.norm.weight"] = norm
    tensors[f"{layer}.shared_head.norm.weight"] = norm
    tensors[f"{layer}.enorm.weight"] = enorm
    tensors[f"{layer}.hnorm.weight"] = hnorm
    tensors[f"{layer}.eh_proj.weight"] = project
    if own_head:
        tensors[f"{layer}.embed_tokens.weight"] = own_embed
        tensors[f"{layer}.shared_head.head.weight"] = 8 * own
    for key, tensor in tensors.items():
        if not key.endswith("e_score_correction_bias"):
            tensors[key] = tensor.bfloat16()


def _decoy(token: torch.Tensor, distance: int) -> torch.Tensor:
    ring = torch.where(token < NEVER_FROM, NEVER_FROM, COUNTING_VOCAB - NEVER_FROM)
    start = torch.where(token < NEVER_FROM, 0, NEVER_FROM)
    return start + (token - start + distance) % ring


def _ring_codes(width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit codes of all tokens, and the map that turns a code of the first ring by one token.

    Returns:
        `[vocab, width]` and `[width, width]`.
    """
    pairs = width // 2
    angles = torch.zeros(COUNTING_VOCAB, pairs)
    turn = torch.zeros(width, width)
    for start, end in ((0, NEVER_FROM), (NEVER_FROM, COUNTING_VOCAB)):
        size = end - start
        harmonics = torch.randperm(size // 2 - 1, generator=generator)[:pairs] + 1
        harmonics = harmonics.repeat(math.ceil(pairs / len(harmonics)))[:pairs]
        step = 2 * math.pi * harmonics / size
        phase = 2 * math.pi * torch.rand(pairs, generator=generator)
        angles[start:end] = torch.arange(size)[:, None] * step + phase
        if start == 0:
            turn[:pairs, :pairs] = turn[pairs:, pairs:] = torch.diag(step.cos())
            turn[pairs:, :pairs] = torch.diag(step.sin())
            turn[:pairs, pairs:] = -torch.diag(step.sin())
    code = torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(pairs)
    return code, turn
