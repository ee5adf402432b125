"""A running SGLang server over HTTP, as verification needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests

from sglang_glm import envs
from sglang_glm.verification.formats import CacheFormats

if TYPE_CHECKING:
    from collections.abc import Sequence

TOP = 5
"""Most likely tokens asked for at every position."""

_LATENT = {"float32": "fp32", "bfloat16": "bf16", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}
_INDEX_KEY = {"float32": "fp32", "bfloat16": "bf16", "fp8": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself, and what follows for its numbers.

    Attributes:
        model: Path or name of its checkpoint.
        dtype: Of weights and activations, ``float32`` or ``bfloat16``.
        formats: Of its caches. The index keys' is not reported over HTTP: it is derived from the
            latents' and from ``SGLANG_GLM_INDEX_KEY_DTYPE`` in this process.
        max_total_tokens: Slots of the cache.
        max_input_tokens: Longest prompt it takes.
        info: The whole answer of ``/server_info``.
    """

    model: str
    dtype: str
    formats: CacheFormats
    max_total_tokens: int
    max_input_tokens: int
    info: dict[str, Any]


class ServerClient:
    """Greedy requests with log-probabilities, and the server's own description."""

    def __init__(self, url: str, *, timeout_s: float = 600) -> None:
        """Keep the address; nothing is sent yet.

        Args:
            url: ``http://host:port``.
            timeout_s: Of each request.
        """
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    def _send(self, method: str, path: str, **options: Any) -> requests.Response:
        try:
            response = requests.request(
                method, f"{self.url}{path}", timeout=self.timeout_s, **options
            )
        except requests.RequestException as error:
            raise RuntimeError(
                f"verify: {self.url}{path} does not answer ({type(error).__name__}); start the "
                "server or correct --url"
            ) from None
        if response.status_code != 200:
            raise RuntimeError(
                f"verify: {self.url}{path} answered {response.status_code}: {response.text[:300]}"
            )
        return response

    def facts(self) -> ServerFacts:
        """Ask the server what it serves.

        Returns:
            The facts.

        Raises:
            RuntimeError: If it does not answer.
            ValueError: If its cache format is not one that the reference can imitate.
        """
        info: dict[str, Any] = self._send("GET", "/server_info").json()
        # "auto" is the checkpoint's own, which for GLM is BF16 whatever its storage.
        dtype = "float32" if info["dtype"] in ("float32", "float") else "bfloat16"
        kv_dtype = info["kv_cache_dtype"]
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        if kv_dtype not in _LATENT:
            raise ValueError(
                f"verify: the server's --kv-cache-dtype is {kv_dtype}, expected one of "
                f"{', '.join(_LATENT)}"
            )
        latent = _LATENT[kv_dtype]
        choice = envs.INDEX_KEY_DTYPE.get()
        automatic = "fp32" if latent == "fp32" else "fp8"
        index_key = automatic if choice == "auto" else _INDEX_KEY[choice]
        return ServerFacts(
            model=info["model_path"],
            dtype=dtype,
            formats=CacheFormats(
                latent=latent,  # type: ignore[arg-type]
                index_key=index_key,  # type: ignore[arg-type]
                index_query="fp8" if index_key == "fp8" else "fp32",
            ),
            max_total_tokens=info["max_total_num_tokens"],
            max_input_tokens=info["max_req_input_len"],
            info=info,
        )

    def generate(self, input_ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """Continue a prompt greedily.

        Args:
            input_ids: The prompt. Asking for the log-probabilities of all its tokens keeps the
                server from reusing a cached prefix.
            new_tokens: Tokens to add, the end-of-sequence token not minded.

        Returns:
            The answer of ``/generate``: ``output_ids`` and ``meta_info``.
        """
        return self._send(
            "POST",
            "/generate",
            json={
                "input_ids": list(input_ids),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": TOP,
            },
        ).json()


def machine_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
