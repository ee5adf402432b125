"""Regular expressions that end an answer (`stop_regex`), before a scheduler searches for them."""

from __future__ import annotations

import re
import re._parser as sre_parse  # type: ignore[import-not-found]
from typing import Any


def check_stop_regex(obj: Any) -> None:
    """Refuse patterns that do not compile, which SGLang answers with 500, or may never end.

    They are searched for in the whole answer after every token, by a scheduler that does nothing else then.

    Raises:
        ValueError: names the pattern and what is wrong with it.
    """
    patterns = (getattr(obj, "sampling_params", None) or {}).get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"stop_regex is {pattern!r}, expected a regular expression: {error}"
            ) from None
        if _repeats_repeats(sre_parse.parse(pattern)):
            raise ValueError(
                f"stop_regex is {pattern!r}, which repeats what consists of repeats: a search may try "
                "exponentially many divisions of the same text; write a+ for (a+)+"
            )


def _repeats_repeats(pattern: sre_parse.SubPattern) -> bool:
    """Whether a part without upper bound consists of nothing but parts without upper bound."""
    if any(map(_repeats_repeats, _parts(pattern))):
        return True
    return any(
        _is_unbounded(operator, value) and all(_is_unbounded(*one) for one in _flat(value[2]))
        for operator, value in pattern
    )


def _is_unbounded(operator: Any, value: Any) -> bool:
    backtracks = (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT)
    return operator in backtracks and value[1] == sre_parse.MAXREPEAT


def _flat(pattern: sre_parse.SubPattern) -> list[tuple[Any, Any]]:
    """The parts of a pattern, those of its groups in their place."""
    flat = []
    for operator, value in pattern:
        flat += _flat(value[3]) if operator == sre_parse.SUBPATTERN else [(operator, value)]
    return flat


def _parts(pattern: sre_parse.SubPattern) -> list[sre_parse.SubPattern]:
    """The patterns within a pattern: of groups, repeats and branches."""
    items = [item for _, value in pattern if isinstance(value, tuple) for item in value]
    parts = [part for item in items for part in (item if isinstance(item, list) else [item])]
    return [part for part in parts if isinstance(part, sre_parse.SubPattern)]
