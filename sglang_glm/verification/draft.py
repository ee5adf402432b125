"""MTP decoding simulated on transformers' modules: what a correct server must reproduce.

One target, one decoder layer as the draft, a chain of drafts (no tree), greedy. Row ``i`` of the
draft pairs token ``i + 1`` with the target's hidden state at ``i`` and predicts token ``i + 2``:

    eh_proj(cat(enorm(embed(x[i+1])), hnorm(h[i]))) -> decoder layer -> norm -> the target's head

``h`` is taken after the target's final norm. A round drafts ``steps`` tokens, the first from the
row that the last accepted token completed, each further one from the draft's own output; the target
then checks all of them in one pass, and the draft's rows are redone with the target's states.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from sglang_glm.verification.hf_cache import rounding_cache, truncate_cache
from sglang_glm.verification.oracle import Oracle, set_latent_norm_eps

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """Output of the MTP layer.

    Attributes:
        logits: ``[rows, vocab_size]``, FP32.
        hidden: ``[rows, hidden_size]``, after ``shared_head.norm``: the next step's ``h``.
        selection: ``[rows, positions]``, int32: what the last call's indexer selected, or was told.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    selection: torch.Tensor


class Draft:
    """The MTP layer of an oracle's checkpoint, with its own cache."""

    def __init__(self, oracle: Oracle) -> None:
        """Load the layer.

        Args:
            oracle: FP32, on a checkpoint with an MTP layer. Gives embedding, head and RoPE.

        Raises:
            ValueError: If the checkpoint has no MTP layer.
        """
        if not oracle.nextn_weights:
            raise ValueError(
                f"Draft: {oracle.directory} has no tensors of layer "
                f"{oracle.config.num_hidden_layers}, expected a checkpoint written with --mtp"
            )
        config = copy.deepcopy(oracle.config)
        config.num_hidden_layers = 1
        config.indexer_types, config.mlp_layer_types = ["full"], ["sparse"]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.oracle = oracle
        self.config = config
        self.enorm = hf.GlmMoeDsaRMSNorm(hidden, eps)
        self.hnorm = hf.GlmMoeDsaRMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = hf.GlmMoeDsaDecoderLayer(config, 0)
        self.norm = hf.GlmMoeDsaRMSNorm(hidden, eps)
        weights = dict(oracle.nextn_weights)
        # Copies of the target's, when a checkpoint has them at all.
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            weights.pop(name, None)
        for prefix, module in (
            ("enorm.", self.enorm),
            ("hnorm.", self.hnorm),
            ("eh_proj.", self.eh_proj),
            ("shared_head.norm.", self.norm),
        ):
            module.load_state_dict({"weight": weights.pop(f"{prefix}weight")})
        self.layer.load_state_dict(weights)
        set_latent_norm_eps(self.layer, eps)
        for module in (self.enorm, self.hnorm, self.eh_proj, self.layer, self.norm):
            module.to(oracle.device).eval()
        self.cache = rounding_cache(1, oracle.formats)
        self.length = 0

    @torch.no_grad()
    def extend(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        hidden: torch.Tensor,
        selection: torch.Tensor | None = None,
    ) -> DraftRows:
        """Run rows after those cached.

        Args:
            token_ids: ``[rows]``. Token ``i + 1`` for row ``i``.
            hidden: ``[rows, hidden_size]``. The hidden state at ``i``.
            selection: ``[positions]``, int32, -1 for none. Attend to these instead of what the
                indexer selects, as index sharing does; index keys are written all the same.

        Returns:
            The rows' output.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.oracle.device)[None]
        model = self.oracle.model
        embeds = model.model.embed_tokens(ids)
        hidden = hidden.to(self.oracle.device)[None]
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=self.cache,
            position_ids=positions,
            allow_is_causal_skip=False,
        )

        def impose(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            assert selection is not None
            chosen = selection[selection >= 0].to(output.dtype)
            return chosen[None, None].expand(1, output.shape[1], -1)

        handle = None
        if selection is not None:
            handle = self.layer.self_attn.indexer.register_forward_hook(impose)
        try:
            x, chosen = self.layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                position_embeddings=model.model.rotary_emb(x, position_ids=positions),
            )
        finally:
            if handle is not None:
                handle.remove()
        self.length += ids.shape[1]
        x = self.norm(x)
        return DraftRows(logits=model.lm_head(x)[0].float(), hidden=x[0], selection=chosen[0])

    def truncate(self, length: int) -> None:
        """Forget rows.

        Args:
            length: Rows to keep.
        """
        truncate_cache(self.cache, length)
        self.length = length


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedText:
    """A text decoded with drafts.

    Attributes:
        token_ids: Tokens after the prompt.
        accepted: Drafts accepted in each round, 0 .. steps.
    """

    token_ids: list[int]
    accepted: list[int]

    def histogram(self, steps: int) -> list[int]:
        """Count rounds by drafts accepted.

        Args:
            steps: Drafts a round.

        Returns:
            ``steps + 1`` counts.
        """
        return [self.accepted.count(count) for count in range(steps + 1)]


def decode_with_drafts(
    oracle: Oracle,
    prompt: Sequence[int],
    count: int,
    *,
    steps: int,
    share_index: bool = False,
) -> DraftedText:
    """Decode greedily with a chain of drafts.

    Args:
        oracle: The target, with an MTP layer.
        prompt: At least one token.
        count: Tokens wanted; the last round may add a few more, which are kept.
        steps: Drafts a round, at least 1.
        share_index: Let every draft step of a round attend to what the indexer selected for the
            round's first row, instead of selecting anew.

    Returns:
        The text. Its tokens are those of plain greedy decoding whatever the drafts.

    Raises:
        ValueError: If ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"decode_with_drafts: steps is {steps}, expected at least 1")
    target, draft = oracle.session(), Draft(oracle)
    logprobs = target.extend(prompt)
    tokens = [*prompt, int(logprobs[-1].argmax())]
    accepted: list[int] = []
    hidden = target.result().final_hidden
    rows = draft.extend(tokens[1:], hidden)
    while len(tokens) - len(prompt) < count:
        committed = len(tokens)
        seed = rows.selection[-1] if share_index else None
        drafts = [int(rows.logits[-1].argmax())]
        state = rows.hidden[-1:]
        for _ in range(steps - 1):
            step = draft.extend(drafts[-1:], state, seed)
            drafts.append(int(step.logits[-1].argmax()))
            state = step.hidden
        draft.truncate(committed - 1)

        predicted = target.extend([tokens[-1], *drafts]).argmax(-1).tolist()
        correct = next((i for i in range(steps) if drafts[i] != predicted[i]), steps)
        accepted.append(correct)
        tokens += predicted[: correct + 1]
        target.truncate(len(tokens) - 1)
        hidden = target.result().final_hidden[committed - 1 :]
        rows = draft.extend(tokens[committed:], hidden)
    return DraftedText(token_ids=tokens[len(prompt) :], accepted=accepted)
