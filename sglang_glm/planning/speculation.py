"""What one MTP round costs, and how many tokens it must yield to pay for itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpShape:
    """A chain of drafts: `--speculative-num-steps` and `--speculative-num-draft-tokens`.

    One round verifies `num_draft_tokens` rows a request with the target and runs the MTP layer
    `num_steps` times: once over the verified rows, which yields the first draft, and
    `num_steps - 1` times over one row a request.
    """

    num_steps: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"plan: MTP num_steps is {self.num_steps}, expected at least 1")
        if self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"plan: MTP num_draft_tokens is {self.num_draft_tokens}, expected "
                f"num_steps + 1 = {self.num_steps + 1}: a chain (eagle_topk 1) verifies its drafts "
                "and the token before them"
            )

    @property
    def max_accept_length(self) -> int:
        """Tokens of a round in which every draft is right."""
        return self.num_draft_tokens


def break_even_accept_length(round_us: float, decode_step_us: float) -> float:
    """Tokens that a round must yield on average to be as fast as plain decoding.

    Args:
        round_us: Time of verify, draft-extend and draft steps.
        decode_step_us: Time of one step without MTP, at the same batch and context.

    Returns:
        Their ratio. Above `MtpShape.max_accept_length` MTP cannot pay.
    """
    if decode_step_us <= 0 or round_us <= 0:
        raise ValueError(
            f"plan: times are {round_us} and {decode_step_us} us, expected positive numbers"
        )
    return round_us / decode_step_us
