"""Makes the index depend on its RoPE layout: ``python -m cookbook.train_tiny.layout STATE OUT``.

Nearness and content survive a server that turns half-split pairs, since every frequency agrees at
distance zero. This trains the one indexer whose selection the retrieving layers use, alone, for
minutes on a CPU. Its divergence from the attention stays small as it is served and becomes large
in the other layout. Everything else of the model stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.chain import shift
from cookbook.train_tiny.index_loss import attention, divergence, sample_rows, scores_of
from cookbook.train_tiny.indexer import index_inputs, rotate_halves
from cookbook.train_tiny.layers import rope_table
from cookbook.train_tiny.model import Model
from cookbook.train_tiny.muon import Optimizer
from cookbook.train_tiny.sequences import UNIT, SequenceWriter
from cookbook.train_tiny.spec import TINY
from cookbook.train_tiny.state import LOG, STATE, Log, load, save

if TYPE_CHECKING:
    from collections.abc import Callable

LAYER = 2
"""The last full layer; 3 and 4 share its selection."""

MARGIN = 4.0
"""Nats by which the other layout shall be further from the attention."""

WEIGHT = 0.2
"""Of what the margin lacks, beside the divergence as served."""

_LENGTHS = (2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one sequence gives the indexer.

    Attributes:
        normed: ``[length, hidden]``, the layer's normed input.
        q_latent: ``[length, q_lora_rank]``.
        rows: ``[1, queries]``, positions.
        wanted: ``[1, queries, length]``, what the layers attend to there.
    """

    normed: torch.Tensor
    q_latent: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor


@torch.no_grad()
def collect(model: Model, count: int, queries: int, seed: int) -> list[Sample]:
    """Run sequences forward: two crowds, then two documents, in turn.

    Args:
        model: The model.
        count: Sequences.
        queries: Of each.
        seed: Of the draw.

    Returns:
        The samples, BF16.
    """
    writer, samples = SequenceWriter(seed), []
    for number in range(count):
        length = _LENGTHS[number % 2]
        piece = writer.crowd(length) if number % 4 < 2 else writer.document(length, (0.15, 0.4))
        ids, weights = (torch.tensor([part]) for part in piece)
        traces = model.forward(ids, sparse=False).traces[LAYER:]
        rows = sample_rows(shift(weights.float() / UNIT, -1), queries)
        wanted = attention(model, traces, rows, torch.arange(length) > rows[..., None])
        samples.append(
            Sample(
                normed=traces[0].normed.bfloat16(),
                q_latent=traces[0].q_latent.bfloat16(),
                rows=rows,
                wanted=wanted.bfloat16(),
            )
        )
    return samples


def losses(model: Model, sample: Sample, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure both layouts on some of a sample's queries.

    Args:
        model: The model.
        sample: The sample.
        queries: How many, drawn at random.

    Returns:
        Two scalars: the divergence as served, and by how much the other layout's is short of
        ``MARGIN`` more.
    """
    length = len(sample.normed)
    some = torch.randperm(sample.rows.shape[1])[:queries]
    rows, wanted = sample.rows[:, some], sample.wanted[:, some].float()
    later = torch.arange(length) > rows[..., None]
    table = rope_table(torch.arange(length), model.spec)
    inputs = (LAYER, sample.normed.float(), sample.q_latent.float(), rows, table)
    model.index_inputs = functools.partial(index_inputs, rounded=True)
    right = divergence(scores_of(model, *inputs), wanted, later)
    model.index_inputs = functools.partial(index_inputs, turn=rotate_halves)
    wrong = divergence(scores_of(model, *inputs), wanted, later)
    return right.mean(), F.relu(right.detach() + MARGIN - wrong).mean()


def tune(
    model: Model,
    samples: list[Sample],
    steps: int,
    *,
    rate: float = 1e-3,
    queries: int = 48,
    report: Callable[[int, float, float], None],
) -> None:
    """Train the indexer.

    Args:
        model: The model; the weights of one indexer change.
        samples: From :func:`collect`.
        steps: Of training, one sample each; the learning rate falls linearly to zero.
        rate: The learning rate at the start.
        queries: Of a sample, a step.
        report: Called every 20 steps with the step and the mean of both losses since.
    """
    optimizer = Optimizer(model.parameters, rate, rate)
    sums = [0.0, 0.0]
    for step in range(steps):
        right, short = losses(model, samples[step % len(samples)], queries)
        (right + WEIGHT * short).backward()
        optimizer.step(min(1.0, (step + 1) / 10) * (1 - step / steps))
        sums = [sums[0] + right.item() / 20, sums[1] + short.item() / 20]
        if step % 20 == 19:
            report(step + 1, *sums)
            sums = [0.0, 0.0]


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="the trainer's --out")
    parser.add_argument("out", type=Path, help="where to write the state that comes of it")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=28)
    parser.add_argument("--seed", type=int, default=77)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / LOG, time.time())
    model = Model(TINY, load(args.state, "cpu"))
    samples = collect(model, args.samples, 192, args.seed)
    log.write(event="layout", samples=len(samples))

    def report(step: int, right: float, short: float) -> None:
        log.write(event="layout", layout_step=step, index=right, short_of_margin=short)

    tune(model, samples, args.steps, report=report)
    save(model, args.out, json.loads((args.state / STATE).read_text()))


if __name__ == "__main__":
    main()
