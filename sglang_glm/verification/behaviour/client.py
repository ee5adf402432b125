"""The two requests that the evaluation sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import requests

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 600


class Client:
    """A server's ``/generate``, greedy."""

    def __init__(self, base_url: str) -> None:
        """Remember the address.

        Args:
            base_url: Such as ``http://127.0.0.1:30000``.
        """
        self.base_url = base_url.rstrip("/")

    def generate(
        self, prompts: Sequence[str] | Sequence[list[int]], max_new_tokens: int, **options: Any
    ) -> list[dict[str, Any]]:
        """Continue prompts, as one batch.

        Args:
            prompts: Texts with GLM's special tokens written out, or token ids.
            max_new_tokens: At most; generation ends before at ``<|user|>``.
            options: Further fields of the request.

        Returns:
            One answer a prompt, in order: ``text``, ``output_ids`` and ``meta_info``.

        Raises:
            RuntimeError: If the server refuses.
        """
        field = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {
            field: list(prompts),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
            **options,
        }
        response = requests.post(f"{self.base_url}/generate", json=body, timeout=TIMEOUT_S)
        if response.status_code != 200:
            raise RuntimeError(
                f"behaviour: /generate answered {response.status_code}: {response.text[:300]}"
            )
        answers: list[dict[str, Any]] = response.json()
        return answers

    def flush_cache(self) -> None:
        """Forget every cached prefix."""
        requests.post(f"{self.base_url}/flush_cache", timeout=TIMEOUT_S)
