"""Flags that a CPU server does not carry."""

from collections.abc import Iterable


def refuse(refusals: Iterable[tuple[str, bool, str]]) -> None:
    """Stop the start at the first flag that is set.

    Args:
        refusals: The flag as it was given, whether it is, and the reason with what to do.

    Raises:
        ValueError: names the flag, the reason and what to do.
    """
    for flag, is_set, reason in refusals:
        if is_set:
            raise ValueError(f"{flag} is not served on the CPU: {reason}")
