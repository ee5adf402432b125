"""Write `mtp_topk16.json`: what a server with drafts must answer, from one without and transformers.

Run after a change to the checkpoint writer's weights or to `tests/support/mtp_traffic.py`:

    python -m tests.golden.make_mtp_golden
"""

from __future__ import annotations

import json
from pathlib import Path

from sglang_glm.verification.oracle import Oracle
from tests.support.mtp_checkpoints import aligned
from tests.support.mtp_simulation import simulate
from tests.support.mtp_traffic import (
    ARGS,
    ENV,
    FULL_LENGTH,
    GOLDEN,
    INDEX_TOPK,
    WAVE,
    reduced,
    traffic,
)
from tests.support.server import Server, ServerSpec

STEPS = 5
#: A text is golden only if no two tokens compete within this log-probability.
MIN_GAP = 1e-4


def check_decided(oracle: Oracle, prompt: tuple[int, ...], output_ids: list[int]) -> None:
    """Refuse a greedy text that rounding could change.

    Raises:
        RuntimeError: names the prompt's length and the gap.
    """
    run = oracle.run([*prompt, *output_ids])
    best = run.logprobs[len(prompt) - 1 : -1].topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if gap < MIN_GAP or run.first_near_tie() is not None:
        raise RuntimeError(
            f"the text after {len(prompt)} tokens has a gap of {gap:.1e} or a near-tie in a "
            "selection; choose another seed"
        )


def make(server: Server) -> dict:
    """Compute everything.

    Args:
        server: Of `aligned(INDEX_TOPK)`, without drafts.

    Returns:
        `answers` by name, and `accepted`: for each request of the wave the drafts of each round.

    Raises:
        RuntimeError: transformers says another text, or rounding could change it.
    """
    answers = {
        name: [reduced(answer) for answer in batch] for name, batch in traffic(server).items()
    }
    model = aligned(INDEX_TOPK)
    oracle = Oracle(Path(model))
    accepted = []
    for request, answer in zip(
        WAVE + FULL_LENGTH, answers["wave"] + answers["full length"], strict=True
    ):
        check_decided(oracle, request.input_ids, answer["output_ids"])
    for request, answer in zip(WAVE, answers["wave"], strict=True):
        text = simulate(model, list(request.input_ids), request.max_new_tokens, STEPS, share=True)
        if text.token_ids[: request.max_new_tokens] != answer["output_ids"]:
            raise RuntimeError(
                f"transformers continues {len(request.input_ids)} tokens otherwise than SGLang"
            )
        accepted.append(text.accepted)
    return {"answers": answers, "accepted": accepted}


def main() -> None:
    """Start a server without drafts, compute, and write."""
    server = Server(ServerSpec(aligned(INDEX_TOPK), ARGS, ENV))
    try:
        GOLDEN.write_text(json.dumps(make(server)) + "\n")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
