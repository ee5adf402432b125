"""EAGLE rounds of a GLM checkpoint on transformers' modules: which drafts a right server accepts.

Nothing is shared with the package but the weights: no cache, no pages, no batch. Every draft step
runs the MTP layer over the whole sequence again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from sglang_glm.verification.oracle import Oracle, index_terms, set_latent_norm_eps


@dataclass(frozen=True, slots=True)
class Simulation:
    """Tokens after the prompt, and how many rounds had 0, 1, ... correct drafts."""

    tokens: list[int]
    histogram: list[int]


class DraftModel:
    """The MTP layer of a checkpoint in transformers."""

    def __init__(self, oracle: Oracle) -> None:
        config = copy.deepcopy(oracle.config)
        config.num_hidden_layers = 1
        config.indexer_types, config.mlp_layer_types = ["full"], ["sparse"]
        weights = dict(oracle.nextn_weights)
        self.oracle, self.index_topk = oracle, config.index_topk
        self.layer = hf.GlmMoeDsaDecoderLayer(config, 0).eval()
        set_latent_norm_eps(self.layer, config.rms_norm_eps)
        norms = {}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            norms[name] = hf.GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
            norms[name].weight.data = weights.pop(f"{name}.weight")
        self.enorm, self.hnorm, self.norm = norms.values()
        self.eh_proj = weights.pop("eh_proj.weight")
        self.layer.load_state_dict(weights)
        self.rotary = hf.GlmMoeDsaRotaryEmbedding(config)
        self._forced: torch.Tensor | None = None
        self.layer.self_attn.indexer.register_forward_hook(self._select, with_kwargs=True)
        self._ranked: torch.Tensor | None = None

    def _select(self, indexer: torch.nn.Module, args: tuple, kwargs: dict, chosen: torch.Tensor):
        hidden_states, q_resid, position_embeddings = args[:3]
        keys = self._keys(indexer, hidden_states, position_embeddings)
        scores = index_terms(
            indexer,
            hidden_states[:, -1:],
            q_resid[:, -1:],
            [p[:, -1:] for p in position_embeddings],
            keys,
            "fp32",
        ).sum(1)[0]
        self._ranked = scores.argsort(descending=True, stable=True)[: self.index_topk]
        if self._forced is not None:
            chosen = chosen.clone()
            # Positions occur twice where fewer are forced than the row has room for.
            filler = self._forced[-1:].expand(chosen.shape[-1] - len(self._forced))
            chosen[0, -1] = torch.cat([self._forced, filler]).to(chosen.dtype)
        return chosen

    @staticmethod
    def _keys(
        indexer: torch.nn.Module, x: torch.Tensor, position_embeddings: tuple
    ) -> torch.Tensor:
        key = indexer.k_norm(indexer.wk(x))[0]
        rope = indexer.qk_rope_head_dim
        even, odd = key[:, :rope].unflatten(-1, (rope // 2, 2)).unbind(-1)
        cos, sin = (p[0, :, : rope // 2] for p in position_embeddings)
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin, key[:, rope:]], -1)

    @torch.no_grad()
    def last_row(
        self, tokens: torch.Tensor, hidden: torch.Tensor, selection: torch.Tensor | None = None
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Run rows of (token i + 1, hidden state i), and look at the last.

        Args:
            tokens: `[rows]`.
            hidden: `[rows, hidden_size]`, after a final norm.
            selection: Positions that the last row attends to; its own choice if None.

        Returns:
            Its most likely token, its hidden state, and the positions that its index ranks best.
        """
        rows = len(tokens)
        embedded = self.oracle.model.model.embed_tokens(tokens)
        x = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1) @ self.eh_proj.T
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]
        self._forced = selection
        out, _ = self.layer(
            x[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(x[None], positions),
        )
        state = self.norm(out[0, -1])
        return int(self.oracle.model.lm_head(state).argmax()), state, self._ranked


def simulate(model: str, prompt: list[int], count: int, steps: int, *, share: bool) -> Simulation:
    """Greedy text and accept histogram of one request.

    Args:
        model: Checkpoint with an MTP layer.
        prompt: Its tokens.
        count: Tokens to generate.
        steps: Draft steps a round.
        share: Whether draft steps reuse the selection of the last verified token, to which the
            drafted positions are added.
    """
    oracle = Oracle(Path(model))
    drafter = DraftModel(oracle)
    run = oracle.greedy(prompt, count + steps + 1)
    text, hidden = run.token_ids, run.final_hidden
    length, histogram = len(prompt), [0] * (steps + 1)
    while length + 1 - len(prompt) < count:
        token, state, ranked = drafter.last_row(text[1 : length + 1], hidden[:length])
        drafts, states = [token], [state]
        for step in range(steps - 1):
            rows = length + step + 1
            forced = None
            # A selection of everything ranks nothing, so the first rows beyond it choose anew.
            if share and length > drafter.index_topk:
                room = drafter.index_topk - step - 1
                forced = torch.cat([ranked[:room], torch.arange(length, rows)])
            token, state, _ = drafter.last_row(
                torch.cat([text[1 : length + 1], torch.tensor(drafts)]),
                torch.cat([hidden[:length], torch.stack(states)]),
                forced,
            )
            drafts.append(token)
            states.append(state)
        correct = 0
        while correct < steps and drafts[correct] == text[length + 1 + correct]:
            correct += 1
        histogram[correct] += 1
        length += correct + 1
    return Simulation(text[len(prompt) : len(prompt) + count].tolist(), histogram)
