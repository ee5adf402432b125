"""Every environment variable of sglang-glm: name, type, default and meaning in one table.

Nothing outside this module reads `SGLANG_GLM_*`. Values are read when asked for, never at import,
so a test or a launcher may set them at any time before the server starts.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"expected one of {sorted(_TRUE | _FALSE)}")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text

    return parse


@dataclass(frozen=True, slots=True)
class EnvVar(Generic[T]):
    """One variable. `get()` parses it and raises `ValueError` naming it when it cannot."""

    name: str
    default: T
    parse: Callable[[str], T]
    meaning: str

    def get(self) -> T:
        """The parsed value, or the default when unset or empty."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(
                f"{self.name}={text!r}: {error}. Unset it to use {self.default!r}."
            ) from None


ENABLE = EnvVar(
    "SGLANG_GLM_ENABLE",
    True,
    _parse_bool,
    "0 turns the plugin off: SGLang runs as if it were not installed",
)
HOST_PLATFORM = EnvVar(
    "SGLANG_GLM_HOST_PLATFORM",
    "auto",
    _choice("auto", "off"),
    "auto: serve on the CPU where no accelerator is present; off: never",
)
INDEX_KEY_DTYPE = EnvVar(
    "SGLANG_GLM_INDEX_KEY_DTYPE",
    "auto",
    _choice("auto", "fp8", "bfloat16", "float32"),
    "storage of the index keys on the CPU; auto: float32 with a float32 KV cache, otherwise fp8 pages",
)
CHECK_INDEX_AGREEMENT = EnvVar(
    "SGLANG_GLM_CHECK_INDEX_AGREEMENT",
    False,
    _parse_bool,
    "1 stops the server when tensor-parallel ranks select different positions; costs two small all-reduces a layer",
)
CUDA_KERNELS = EnvVar(
    "SGLANG_GLM_CUDA_KERNELS",
    "auto",
    _choice("auto", "named"),
    "auto: our CUDA kernels serve where they were measured to be faster; named: only where a flag names them",
)
DIVIDE_INDEX_SCAN = EnvVar(
    "SGLANG_GLM_DIVIDE_INDEX_SCAN",
    "auto",
    _choice("auto", "on", "off"),
    "whether tensor-parallel ranks divide the index scan: by history on the CPU, prefill and verify rows by row and request on CUDA; auto: where that is predicted to be faster on the CPU, not on CUDA",
)

ALL: tuple[EnvVar, ...] = (
    ENABLE,
    HOST_PLATFORM,
    INDEX_KEY_DTYPE,
    CHECK_INDEX_AGREEMENT,
    CUDA_KERNELS,
    DIVIDE_INDEX_SCAN,
)


def check() -> None:
    """Parse every variable now, and refuse names with our prefix that do not exist.

    Raises:
        ValueError: a value cannot be parsed, or an unknown `SGLANG_GLM_*` variable is set.
    """
    known = {variable.name for variable in ALL}
    unknown = sorted(
        name for name in os.environ if name.startswith("SGLANG_GLM_") and name not in known
    )
    if unknown:
        raise ValueError(
            f"unknown variable {', '.join(unknown)}; known ones are {', '.join(sorted(known))}"
        )
    for variable in ALL:
        variable.get()
