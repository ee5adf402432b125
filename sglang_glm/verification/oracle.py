"""Runs a checkpoint in transformers' ``GlmMoeDsaForCausalLM``: the independent truth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from sglang_glm.verification.formats import CacheFormats, round_index
from sglang_glm.verification.hf_cache import rounding_cache, truncate_cache
from sglang_glm.verification.hf_weights import read_weights, split_nextn, stack_experts
from sglang_glm.verification.near_tie import (
    NEAR_TIE_BOUND,
    Selection,
    first_near_tie,
    head_scores,
    select_positions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MAX_TERMS = 2**26
"""Bound on rows * index heads * keys of one forward, which holds several such FP32 tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleRun:
    """What the oracle computed for one sequence.

    Attributes:
        token_ids: ``[rows]``, int64. The sequence.
        logprobs: ``[rows, vocab_size]``, FP32. Row ``i`` is the distribution of token ``i + 1``.
        hidden_states: ``[layers + 1, rows, hidden_size]``, FP32: the embedding, then each decoder
            layer's output before the final norm. Empty unless asked for.
        final_hidden: ``[rows, hidden_size]``, after the final norm; what an MTP layer is fed.
        selections: Full layer to the positions that it selected, ``[rows, index_topk]``, int32,
            ascending, -1 at the tail.
        relative_gap: ``[rows]``, FP32. Smallest over full layers; see ``near_tie``.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    hidden_states: torch.Tensor
    final_hidden: torch.Tensor
    selections: dict[int, torch.Tensor]
    relative_gap: torch.Tensor

    def token_logprobs(self) -> torch.Tensor:
        """Log-probabilities that the sequence gave its own tokens.

        Returns:
            ``[rows - 1]``, FP32; entry ``i`` belongs to token ``i + 1``.
        """
        return self.logprobs[:-1].gather(1, self.token_ids[1:, None])[:, 0]

    def top(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Most likely next tokens.

        Args:
            count: How many a row.

        Returns:
            Log-probabilities and token ids, both ``[rows, count]``, best first.
        """
        values, ids = self.logprobs.topk(count, dim=-1)
        return values, ids

    def first_near_tie(self, bound: float = NEAR_TIE_BOUND) -> int | None:
        """First row from which a correct server may differ.

        Args:
            bound: See ``near_tie.first_near_tie``.

        Returns:
            The row, or None.
        """
        return first_near_tie(self.relative_gap, bound)


def load_config(directory: Path) -> GlmMoeDsaConfig:
    """Read ``config.json`` as transformers does, less the quantisation.

    Args:
        directory: The checkpoint.

    Returns:
        The config, with eager attention.

    Raises:
        ValueError: If the checkpoint asks for a RoPE layout that transformers does not implement.
    """
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    values.pop("quantization_config", None)
    for key in ("rope_interleave", "indexer_rope_interleave"):
        if not values.get(key, True):
            raise ValueError(
                f"load_config: {key} is false in {directory}, expected true: transformers "
                "rotates interleaved pairs only and cannot be the reference"
            )
    config = GlmMoeDsaConfig.from_dict(values)
    config._attn_implementation = "eager"
    return config


def set_latent_norm_eps(module: torch.nn.Module, eps: float) -> None:
    """Set the epsilon of every ``q_a_layernorm`` and ``kv_a_layernorm`` below ``module``.

    transformers 5.19 builds both with 1e-6 whatever ``rms_norm_eps`` says, an inheritance from
    DeepSeek, whose configs say 1e-6 anyway. The released GLM-5.x configs say 1e-5, and SGLang,
    vLLM and GLM's own later modules use it for these two norms as well
    (huggingface/transformers#48762).

    Args:
        module: A model or a decoder layer of transformers'.
        eps: The epsilon.
    """
    for name, child in module.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            child.variance_epsilon = eps


class Oracle:
    """One checkpoint in transformers, with the serving caches' number formats if asked for."""

    def __init__(
        self,
        directory: Path,
        *,
        formats: CacheFormats | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        latent_norm_eps: float | None = None,
    ) -> None:
        """Load the checkpoint.

        Args:
            directory: BF16 or block-FP8 checkpoint; FP8 weights are dequantised to FP32.
            formats: Number formats of the caches; FP32 by default.
            dtype: Of weights and activations. FP32 is the truth; BF16 gives transformers' own
                BF16 error as a yardstick.
            device: Where to run.
            latent_norm_eps: Epsilon of the two latent norms, ``rms_norm_eps`` by default.

        Raises:
            ValueError: If the checkpoint is not one that transformers can load.
        """
        self.directory = directory
        self.formats = formats or CacheFormats()
        self.config = load_config(directory)
        weights, self.nextn_weights = split_nextn(
            stack_experts(read_weights(directory)), self.config.num_hidden_layers
        )
        with torch.device("meta"):
            model = GlmMoeDsaForCausalLM(self.config)
        model.to_empty(device=device)
        model.load_state_dict(weights)
        # transformers' own exception to a BF16 load
        keep_fp32 = {
            name: value.clone()
            for name, value in model.state_dict().items()
            if name.endswith("e_score_correction_bias")
        }
        model.to(dtype).load_state_dict(keep_fp32, strict=False, assign=True)
        # Not in the checkpoint, and FP32 whatever the model's dtype.
        model.model.rotary_emb = hf.GlmMoeDsaRotaryEmbedding(self.config).to(device)
        set_latent_norm_eps(
            model, self.config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps
        )
        self.model = model.eval()
        self.device = device
        self.full_layers = [
            layer for layer, kind in enumerate(self.config.indexer_types) if kind == "full"
        ]
        if self.formats.index_query != "fp32":
            for layer in self.full_layers:
                _round_queries(self._indexer(layer), self.formats)

    def _indexer(self, layer: int) -> hf.GlmMoeDsaIndexer:
        return self.model.model.layers[layer].self_attn.indexer

    def session(self, *, keep_hidden: bool = False) -> OracleSession:
        """Start an empty sequence.

        Args:
            keep_hidden: Also keep every layer's output.

        Returns:
            A session.
        """
        return OracleSession(self, keep_hidden=keep_hidden)

    def run(
        self, token_ids: Sequence[int] | torch.Tensor, *, keep_hidden: bool = False
    ) -> OracleRun:
        """Run one sequence.

        Args:
            token_ids: At least one token.
            keep_hidden: Also keep every layer's output.

        Returns:
            The run.
        """
        session = self.session(keep_hidden=keep_hidden)
        session.extend(token_ids)
        return session.result()

    def greedy(self, prompt: Sequence[int] | torch.Tensor, count: int) -> OracleRun:
        """Continue a prompt with the most likely token, ``count`` times.

        Args:
            prompt: At least one token.
            count: Tokens to add.

        Returns:
            The run over the prompt and all added tokens but the last, whose id is
            ``run.logprobs[-1].argmax()``; see :func:`continuation`.
        """
        session = self.session()
        logprobs = session.extend(prompt)
        for _ in range(count - 1):
            logprobs = session.extend(logprobs[-1:].argmax(-1))
        return session.result()


def continuation(run: OracleRun, prompt_length: int) -> list[int]:
    """Tokens that a greedy run added to its prompt.

    Args:
        run: From :meth:`Oracle.greedy`.
        prompt_length: Tokens of the prompt.

    Returns:
        The added tokens, the last included.
    """
    return [*run.token_ids[prompt_length:].tolist(), int(run.logprobs[-1].argmax())]


class OracleSession:
    """A sequence that grows, with its cache."""

    def __init__(self, oracle: Oracle, *, keep_hidden: bool) -> None:
        self.oracle = oracle
        self.keep_hidden = keep_hidden
        self.cache = rounding_cache(oracle.config.num_hidden_layers, oracle.formats)
        self.length = 0
        self._token_ids: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._final: list[torch.Tensor] = []
        self._hidden: list[torch.Tensor] = []
        self._selections: dict[int, list[Selection]] = {layer: [] for layer in oracle.full_layers}

    def extend(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Append tokens.

        Args:
            token_ids: At least one token.

        Returns:
            ``[tokens, vocab_size]``, FP32: each new row's log-probabilities of the next token.

        Raises:
            ValueError: If there is no token or one is outside the vocabulary.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.oracle.device).flatten()
        vocab_size = self.oracle.config.vocab_size
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ValueError(
                f"OracleSession.extend: got {len(ids)} tokens in "
                f"[{int(ids.min()) if len(ids) else '-'}, {int(ids.max()) if len(ids) else '-'}], "
                f"expected at least one, each in [0, {vocab_size})"
            )
        keys = self.length + len(ids)
        rows = max(1, _MAX_TERMS // (self.oracle.config.index_n_heads * keys))
        return torch.cat([self._extend(chunk) for chunk in ids.split(rows)])

    @torch.no_grad()
    def _extend(self, ids: torch.Tensor) -> torch.Tensor:
        model = self.oracle.model
        hidden: list[torch.Tensor] = []
        handles = [
            self.oracle._indexer(layer).register_forward_hook(self._observe, with_kwargs=True)
            for layer in self.oracle.full_layers
        ]
        if self.keep_hidden:
            handles.append(
                model.model.embed_tokens.register_forward_hook(
                    lambda _module, _args, output: hidden.append(output[0].float())
                )
            )
            handles += [
                layer.register_forward_hook(
                    lambda _module, _args, output: hidden.append(output[0][0].float())
                )
                for layer in model.model.layers
            ]
        try:
            output = model.model(input_ids=ids[None], past_key_values=self.cache, use_cache=True)
        finally:
            for handle in handles:
                handle.remove()
        final = output.last_hidden_state
        logits = model.lm_head(final)[0].double()
        logprobs = torch.log_softmax(logits, -1).float()
        self.length += len(ids)
        self._token_ids.append(ids)
        self._logprobs.append(logprobs)
        self._final.append(final[0].float())
        if self.keep_hidden:
            self._hidden.append(torch.stack(hidden))
        return logprobs

    def _observe(
        self, indexer: hf.GlmMoeDsaIndexer, args: tuple[Any, ...], kwargs: Any, output: Any
    ) -> None:
        """Recompute what the indexer just scored, which it does not return."""
        hidden_states, q_resid, position_embeddings = args[:3]
        keys = self.cache.layers[indexer.layer_idx].indexer_keys[0]
        terms = index_terms(
            indexer,
            hidden_states,
            q_resid,
            position_embeddings,
            keys,
            self.oracle.formats.index_query,
        )
        selection = select_positions(terms, indexer.index_topk, self.length)
        self._selections[indexer.layer_idx].append(selection)

    def truncate(self, length: int) -> None:
        """Forget all tokens from ``length`` on, as a server drops rejected drafts.

        Args:
            length: Tokens to keep.

        Raises:
            ValueError: If the sequence is shorter.
        """
        if not 0 <= length <= self.length:
            raise ValueError(
                f"OracleSession.truncate: length is {length}, expected within [0, {self.length}]"
            )
        truncate_cache(self.cache, length)
        self.length = length
        self._token_ids = [torch.cat(self._token_ids)[:length]]
        self._logprobs = [torch.cat(self._logprobs)[:length]]
        self._final = [torch.cat(self._final)[:length]]
        if self._hidden:
            self._hidden = [torch.cat(self._hidden, 1)[:, :length]]
        for layer, selections in self._selections.items():
            whole = _join_selections(selections)
            self._selections[layer] = [
                Selection(
                    positions=whole.positions[:length], relative_gap=whole.relative_gap[:length]
                )
            ]

    def result(self) -> OracleRun:
        """Gather everything computed so far.

        Returns:
            The run over all tokens.
        """
        selections = {layer: _join_selections(parts) for layer, parts in self._selections.items()}
        gaps = [selection.relative_gap for selection in selections.values()]
        return OracleRun(
            token_ids=torch.cat(self._token_ids).cpu(),
            logprobs=torch.cat(self._logprobs).cpu(),
            hidden_states=torch.cat(self._hidden, 1).cpu() if self._hidden else torch.empty(0),
            final_hidden=torch.cat(self._final).cpu(),
            selections={
                layer: selection.positions.cpu() for layer, selection in selections.items()
            },
            relative_gap=torch.stack(gaps).amin(0).cpu(),
        )


def _join_selections(parts: Sequence[Selection]) -> Selection:
    return Selection(
        positions=torch.cat([part.positions for part in parts]),
        relative_gap=torch.cat([part.relative_gap for part in parts]),
    )


def index_terms(
    indexer: hf.GlmMoeDsaIndexer,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    query_format: str,
) -> torch.Tensor:
    """Per-head index scores from a transformers indexer's weights and inputs.

    Args:
        indexer: Gives the weights.
        hidden_states: ``[1, rows, hidden_size]``, the layer's normed input.
        q_resid: ``[1, rows, q_lora_rank]``, after ``q_a_layernorm``.
        position_embeddings: cos and sin, each ``[1, rows, qk_rope_head_dim]``, of which the first
            half holds one angle a pair.
        keys: ``[keys, index_head_dim]``, as cached.
        query_format: See ``CacheFormats.index_query``.

    Returns:
        ``[rows, index_n_heads, keys]``, FP32.
    """
    heads, width, rope = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid)[0].unflatten(-1, (heads, width))  # [rows, heads, width]
    pairs = q[..., :rope].unflatten(-1, (rope // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    cos = position_embeddings[0][0, :, None, : rope // 2]
    sin = position_embeddings[1][0, :, None, : rope // 2]
    # transformers leaves the rotated pairs de-interleaved, queries and keys alike
    q = torch.cat([even * cos - odd * sin, odd * cos + even * sin, q[..., rope:]], -1)
    q = round_index(q, query_format)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))[0]
    return head_scores(q, keys, weights.float() * heads**-0.5)


def _round_queries(indexer: hf.GlmMoeDsaIndexer, formats: CacheFormats) -> None:
    """Make an indexer select by scores of rounded queries, with the project's tie rule.

    transformers' forward leaves no place to round its queries, so its result is replaced; the
    call still runs, which writes the index key.
    """

    def select(
        module: hf.GlmMoeDsaIndexer, args: tuple[Any, ...], kwargs: Any, output: torch.Tensor
    ) -> torch.Tensor:
        hidden_states, q_resid, position_embeddings = args[:3]
        keys = kwargs["past_key_values"].layers[module.layer_idx].indexer_keys[0]
        terms = index_terms(
            module, hidden_states, q_resid, position_embeddings, keys, formats.index_query
        )
        first_position = len(keys) - hidden_states.shape[1]
        positions = select_positions(terms, module.index_topk, first_position).positions
        # Positions beyond the row's own are masked by transformers: a harmless filler.
        filler = len(keys) - 1
        kept = min(module.index_topk, len(keys))
        chosen = torch.where(positions < 0, filler, positions)[:, :kept]
        return chosen[None].to(output.dtype)

    indexer.register_forward_hook(select, with_kwargs=True)
