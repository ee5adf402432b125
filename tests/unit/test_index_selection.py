"""When ranks divide a scan: never alone, always or never when told, otherwise by the predicted saving."""

from __future__ import annotations

import pytest
import torch

from sglang_glm.attention.metadata import RequestRows
from sglang_glm.layers.index_selection import is_divided

VARIABLE = "SGLANG_GLM_DIVIDE_INDEX_SCAN"


def requests(num_rows: int, length: int) -> list[RequestRows]:
    return [RequestRows(first_row=0, num_rows=num_rows, slots=torch.zeros(length))]


@pytest.mark.parametrize(
    ("choice", "length", "world_size", "divided"),
    [
        ("auto", 32768, 1, False),
        ("auto", 2100, 2, False),
        ("auto", 32768, 2, True),
        ("on", 2100, 2, True),
        ("on", 2100, 1, False),
        ("off", 32768, 2, False),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, choice: str, length: int, world_size: int, divided: bool
) -> None:
    monkeypatch.setenv(VARIABLE, choice)
    assert is_divided(requests(1, length), 2048, world_size) is divided


def test_other_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(ValueError, match=VARIABLE):
        is_divided(requests(1, 32768), 2048, 2)
