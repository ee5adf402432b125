"""The MTP layer's rounds of drafts, for every position of a sequence at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.layers import rope_table
from cookbook.train_tiny.model import LayerTrace

if TYPE_CHECKING:
    from cookbook.train_tiny.model import Model


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Move along axis 1: ``out[:, p] = x[:, p - by]``, zero where there is none."""
    if by < 0:
        return F.pad(x[:, -by:], (0, 0) * (x.ndim - 2) + (0, -by))
    return F.pad(x[:, : x.shape[1] - by], (0, 0) * (x.ndim - 2) + (by, 0))


class Chain:
    """The deeper steps of a round of drafts, for rounds that begin at every position at once.

    In step ``j`` row ``p`` belongs to the round whose first row was ``p - j``. It attends to the
    rows up to that one as the MTP layer computed them from the target's hidden states, and to the
    ``j`` rows after them as the chain itself computed them: just what the server's caches hold.
    """

    def __init__(self, model: Model, trace: LayerTrace, output: torch.Tensor, length: int) -> None:
        """Begin after the first step.

        Args:
            model: The model.
            trace: The MTP layer's first step on these sequences.
            output: ``[sequences, length, hidden]``, after ``shared_head.norm``.
            length: Tokens a sequence.
        """
        self.model = model
        self.sequences = output.shape[0]
        self.length = length
        self.output = output
        self.k, self.v = (part.unflatten(0, (-1, length)) for part in (trace.k, trace.v))
        self.mask = trace.mask
        positions = torch.arange(length, device=output.device).repeat(self.sequences)
        self.table = rope_table(positions, model.spec)
        self.drafted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, next_ids: torch.Tensor) -> torch.Tensor:
        """Run a step.

        Args:
            next_ids: ``[sequences, length]``, the token after each position.

        Returns:
            ``[sequences, length, hidden]``, after ``shared_head.norm``. Rows before the step's
            number mean nothing.
        """
        model, length = self.model, self.length
        spec = model.spec
        depth = len(self.drafted) + 1
        hidden = shift(self.output, 1)
        x = model.nextn_input(hidden.flatten(0, 1), next_ids.flatten())
        q, k, v, _, _ = model.project(spec.num_hidden_layers, x, self.table)
        q, k, v = (part.unflatten(0, (-1, length)) for part in (q, k, v))
        self.drafted.append((k, v))
        position = torch.arange(length, device=x.device)
        unseen = position[None] > position[:, None] - depth
        unseen = unseen | ~shift(self.mask, depth) if self.mask is not None else unseen[None]
        logits = torch.einsum("bqhd,bkhd->bhqk", q, self.k).float()
        logits = logits.masked_fill(unseen[:, None], float("-inf"))
        own, values = [], []
        for number, (drafted_k, drafted_v) in enumerate(self.drafted, start=1):
            own.append((q * shift(drafted_k, depth - number)).sum(-1).float())
            values.append(shift(drafted_v, depth - number))
        logits = torch.cat([logits, torch.stack(own, -1).transpose(1, 2)], -1)
        weights = (logits * spec.qk_head_dim**-0.5).softmax(-1).to(v.dtype)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], self.v)
        for number, value in enumerate(values):
            attended = attended + weights[..., length + number].transpose(1, 2)[..., None] * value
        x, _ = model.tail(spec.num_hidden_layers, x, attended.flatten(0, 1).flatten(1))
        self.output = model.nextn_norm(x).unflatten(0, (-1, length))
        return self.output


def first_sequences(trace: LayerTrace, rows: int, length: int, kept: int) -> LayerTrace:
    """Cut a trace of ``[all, length]`` sequences to the first ``rows``, ``kept`` tokens each."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, length))[:rows, :kept].flatten(0, 1)

    mask = trace.mask
    return LayerTrace(
        q=cut(trace.q),
        k=cut(trace.k),
        v=cut(trace.v),
        normed=cut(trace.normed),
        q_latent=cut(trace.q_latent),
        mask=None if mask is None else mask[:rows, :kept, :kept],
    )
