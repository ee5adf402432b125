"""Write the golden entries beside this file from transformers.

Run after a change to the checkpoint writer's weights, and say so in the CHANGELOG under Numerics:

    python tests/golden/make_golden.py [NAME ...]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.writer import read_manifest, write_checkpoint
from sglang_glm.verification.formats import CacheFormats
from sglang_glm.verification.golden import GoldenEntry, make_entry, save_entry
from sglang_glm.verification.oracle import Oracle
from sglang_glm.verification.prompts import ordinary_vocab, random_prompt

HERE = Path(__file__).parent
NEW_TOKENS = 16
MIN_GREEDY_GAP = 2e-4
"""A greedy continuation is only golden if no two tokens compete within this log-probability."""

FP32_CACHES = CacheFormats()
FP8_CACHES = CacheFormats(latent="fp8", index_key="fp8", index_query="fp8")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one entry is made."""

    spec: CheckpointSpec
    length: int
    formats: CacheFormats = FP32_CACHES
    first_row: int = 0


TOPK8 = CheckpointSpec(index_topk=8, num_nextn_predict_layers=1)
TOPK64 = CheckpointSpec(index_topk=64, num_nextn_predict_layers=1)
TOPK2048 = CheckpointSpec(index_topk=2048, num_nextn_predict_layers=1)
FP8_WEIGHTS = CheckpointSpec(index_topk=8, num_nextn_predict_layers=1, fp8=True)

RECIPES: dict[str, Recipe] = {
    "topk8_len5": Recipe(spec=TOPK8, length=5),
    "topk8_len200": Recipe(spec=TOPK8, length=200),
    "topk64_len48": Recipe(spec=TOPK64, length=48),
    "topk64_len300": Recipe(spec=TOPK64, length=300),
    # Decode walks across index_topk, from 2040 visible positions to 2056.
    "topk2048_len2040": Recipe(spec=TOPK2048, length=2040, first_row=1976),
    "fp8_weights_topk8_len100": Recipe(spec=FP8_WEIGHTS, length=100),
    "fp8_caches_topk8_len40": Recipe(spec=TOPK8, length=40, formats=FP8_CACHES),
    "fp8_caches_topk64_len100": Recipe(spec=TOPK64, length=100, formats=FP8_CACHES),
}


def load_oracle(name: str, workspace: Path) -> tuple[Oracle, str]:
    """Write an entry's checkpoint and load it.

    Args:
        name: A key of ``RECIPES``.
        workspace: Where to write checkpoints; may be shared between calls.

    Returns:
        The oracle and the hash of its weights.
    """
    recipe = RECIPES[name]
    checkpoint = workspace / f"topk{recipe.spec.index_topk}-fp8{int(recipe.spec.fp8)}"
    write_checkpoint(recipe.spec, checkpoint)
    manifest = read_manifest(checkpoint)
    assert manifest is not None, checkpoint
    return Oracle(checkpoint, formats=recipe.formats), str(manifest["weights_sha256"])


def compute(
    name: str, oracle: Oracle, weights_sha256: str, prompt: list[int]
) -> GoldenEntry | None:
    """Compute one entry.

    Args:
        name: A key of ``RECIPES``.
        oracle: From :func:`load_oracle`.
        weights_sha256: From :func:`load_oracle`.
        prompt: Token ids.

    Returns:
        The entry, or None if rounding could change its selections or its continuation.
    """
    recipe = RECIPES[name]
    run = oracle.greedy(prompt, NEW_TOKENS)
    best = run.logprobs[len(prompt) - 1 :].topk(2).values
    undecided = float((best[:, 0] - best[:, 1]).min()) <= MIN_GREEDY_GAP
    if undecided or run.first_near_tie() is not None:
        return None
    return make_entry(
        recipe.spec,
        weights_sha256,
        recipe.formats,
        run,
        prompt_length=len(prompt),
        first_row=recipe.first_row,
    )


def make(name: str, workspace: Path) -> GoldenEntry:
    """Compute one entry from the first prompt that gives a decided run.

    Args:
        name: A key of ``RECIPES``.
        workspace: See :func:`load_oracle`.

    Returns:
        The entry.

    Raises:
        RuntimeError: If no seed among the first hundred gives one.
    """
    oracle, weights_sha256 = load_oracle(name, workspace)
    vocab = ordinary_vocab(oracle.directory)
    for seed in range(100):
        prompt = random_prompt(vocab, RECIPES[name].length, seed)
        entry = compute(name, oracle, weights_sha256, prompt)
        if entry is not None:
            return entry
    raise RuntimeError(f"make_golden: {name}: no decided run within 100 seeds")


def main() -> None:
    """Write the entries named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *RECIPES], default=[])
    names = parser.parse_args().names or list(RECIPES)
    with tempfile.TemporaryDirectory() as workspace:
        for name in names:
            path = HERE / f"{name}.safetensors"
            save_entry(make(name, Path(workspace)), path)
            print(f"{path.name}: {path.stat().st_size / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
