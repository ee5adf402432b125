"""Makes SGLang find our model classes."""

import os

from sglang_glm.config import ARCHITECTURES

PACKAGE = "sglang_glm.models"


def select_model_package() -> None:
    """Name our package in the environment, which SGLang's registry reads when it is first imported.

    Raises:
        RuntimeError: another external model package is named already.
    """
    named = os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE")
    if named and named != PACKAGE:
        raise RuntimeError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE={named!r} is set, and SGLang takes one such package; "
            "unset it, or turn sglang-glm off"
        )
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE


def check_model_package() -> str | None:
    """None when the registry resolves both architectures to our classes.

    SGLang skips a module of the package that fails to import with a warning and would then serve
    its own class, so the result is what counts.
    """
    from sglang.srt.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        found = ModelRegistry.models.get(architecture)
        if found is None:
            return f"ModelRegistry does not hold {architecture}; importing {PACKAGE} failed"
        if not found.__module__.startswith(PACKAGE):
            return f"ModelRegistry holds {found.__module__}.{architecture}"
    return None
