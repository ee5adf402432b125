"""A golden entry as a server that is right would have answered it."""

from sglang_glm.verification.compare import ServerLogprobs
from sglang_glm.verification.golden import GoldenEntry


def right_answer(entry: GoldenEntry) -> ServerLogprobs:
    """The entry's own numbers in tensors of their own, for a test to change."""
    return ServerLogprobs(
        rows=entry.rows,
        token_ids=entry.token_ids[entry.rows + 1],
        token_logprobs=entry.token_logprobs.clone(),
        top_ids=entry.top_ids.long(),
        top_logprobs=entry.top_logprobs.clone(),
    )
