"""A row of logits without any token can be sampled from; all others are as they were."""

import torch

from sglang_glm.compat.host.sampler import preprocess_logits

INF = float("inf")


def test_empty_rows() -> None:
    logits = torch.tensor([[1.0, -INF, 2.0], [-INF, -INF, -INF], [-INF, -INF, -3e38]])
    rows = logits.clone()
    seen = []

    def original(sampler: str, given: torch.Tensor, info: str) -> torch.Tensor:
        seen.append((sampler, info))
        return given

    assert preprocess_logits(original, "sampler", rows, "info") is rows
    assert seen == [("sampler", "info")]
    assert torch.equal(rows[[0, 2]], logits[[0, 2]]) and rows[1].tolist() == [0, 0, 0]
    torch.multinomial(rows.softmax(-1), 1)


def test_no_rows() -> None:
    assert preprocess_logits(lambda _, given, __: given, None, torch.empty(0, 5), None).shape == (
        0,
        5,
    )
