"""Checkpoints for tests: written once, kept between runs under `.cache/`."""

import functools

from sglang_glm.cli.main import main
from tests.support.cache import cache_directory


@functools.cache
def checkpoint(*options: str) -> str:
    """Directory of the checkpoint that `sglang-glm checkpoint DIR *options` writes.

    The writer leaves a directory alone that already holds the same checkpoint.
    """
    name = "-".join(option.lstrip("-").replace(",", "_") for option in options) or "default"
    directory = cache_directory() / name
    if main(["checkpoint", str(directory), *options]) not in (None, 0):
        raise RuntimeError(f"sglang-glm checkpoint {' '.join(options)} failed")
    return str(directory)
