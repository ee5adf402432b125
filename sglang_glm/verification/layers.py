"""The first layer whose hidden states differ from transformers'.

The server writes them itself: SGLang's ``--debug-tensor-dump-output-folder`` saves what every leaf
module returned, one file a forward pass. The norms of the residual stream return it next to their
output, which gives two stages a layer: after the attention, and after the MLP.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_glm.verification.client import ServerClient
    from sglang_glm.verification.oracle import Oracle

DUMP_FLAG = "--debug-tensor-dump-output-folder"
FP32_BOUND = 1e-4
"""Allowed error of a hidden state in FP32, in units of its row's root mean square."""
BF16_RATIO = 4.0
"""Allowed error in BF16, in units of transformers' own at the same stage."""

_WRITTEN_WITHIN_S = 30.0

Stages = dict[str, torch.Tensor]
"""Name of a stage to the residual stream there, ``[rows, hidden_size]``, FP32, in order."""


def stage_names(indexer_types: Sequence[str], first_k_dense_replace: int) -> list[str]:
    """Names of all stages.

    Args:
        indexer_types: ``full`` or ``shared`` for each layer.
        first_k_dense_replace: Leading layers with a dense MLP.

    Returns:
        ``embedding``, then two a layer.
    """
    names = ["embedding"]
    for layer, kind in enumerate(indexer_types):
        mlp = "dense MLP" if layer < first_k_dense_replace else "experts"
        names += [f"layer {layer} attention ({kind} index)", f"layer {layer} {mlp}"]
    return names


def reference_stages(oracle: Oracle, token_ids: Sequence[int]) -> Stages:
    """Run transformers and keep the residual stream at every stage.

    Args:
        oracle: The reference.
        token_ids: The prompt.

    Returns:
        The stages.
    """
    after_attention: list[list[torch.Tensor]] = [[] for _ in oracle.model.model.layers]
    handles = [
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _module, args, kept=kept: kept.append(args[0][0].float())
        )
        for layer, kept in zip(oracle.model.model.layers, after_attention, strict=True)
    ]
    try:
        hidden = oracle.run(token_ids, keep_hidden=True).hidden_states
    finally:
        for handle in handles:
            handle.remove()
    states = [hidden[0]]
    for layer, kept in enumerate(after_attention):
        states += [torch.cat(kept).cpu(), hidden[layer + 1]]
    return dict(zip(_names(oracle), states, strict=True))


def _names(oracle: Oracle) -> list[str]:
    return stage_names(oracle.config.indexer_types, oracle.config.first_k_dense_replace)


def dumped_stages(passes: Sequence[dict[str, Any]], names: Sequence[str]) -> Stages:
    """Put the residual stream together from a server's dump.

    Args:
        passes: Of one prompt, in order; several where it was prefilled in chunks.
        names: From :func:`stage_names`.

    Returns:
        The stages that were dumped. A kernel that fuses a norm with something else passes by the
        module and leaves a gap.
    """
    num_layers = (len(names) - 1) // 2
    # The norm that follows an MLP is the next layer's first, or the model's last.
    after_mlp = [f"model.layers.{layer}.input_layernorm" for layer in range(1, num_layers)]
    sources = ["model.embed_tokens"]
    for layer, follower in enumerate([*after_mlp, "model.norm"]):
        sources += [f"model.layers.{layer}.post_attention_layernorm", follower]
    stages: Stages = {}
    for name, source in zip(names, sources, strict=True):
        parts = []
        for dump in passes:
            value = dump.get(source)
            if isinstance(value, list):
                value = value[1] if len(value) == 2 else None
            elif source != "model.embed_tokens":
                value = None
            if value is None:
                break
            # Rows beyond the positions are padding.
            parts.append(value[: len(dump["model.forward_batch_info.positions"])].float())
        if len(parts) == len(passes):
            stages[name] = torch.cat(parts)
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """One stage.

    Attributes:
        stage: Its name.
        error: Largest error, in units of the row's root mean square.
        position: Where it is, of the positions compared.
        allowed: The bound.
        first_position: First position beyond the bound; None if there is none.
    """

    stage: str
    error: float
    position: int
    allowed: float
    first_position: int | None

    def describe(self) -> str:
        """The difference in words."""
        return (
            f"{self.stage}, from position {self.first_position} on: error {self.error:.1e} of the "
            f"row's size, allowed {self.allowed:.1e}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """All stages of one prompt.

    Attributes:
        prompt_tokens: Its length.
        compared_positions: Positions before the first near-tie.
        stages: In order.
        missing: Stages that the server's kernels did not let out.
    """

    prompt_tokens: int
    compared_positions: int
    stages: list[StageDifference]
    missing: list[str]

    @property
    def first(self) -> StageDifference | None:
        """The first stage beyond its bound."""
        return next((stage for stage in self.stages if stage.first_position is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {**asdict(self), "first": None if self.first is None else asdict(self.first)}

    def render(self) -> list[str]:
        """The report as lines of text."""
        first = self.first
        lines = [
            f"  hidden states of {self.prompt_tokens} tokens, "
            f"{self.compared_positions} positions compared"
        ]
        if first is None:
            worst = max(self.stages, key=lambda stage: stage.error)
            lines.append(
                f"  all {len(self.stages)} stages agree; largest error {worst.error:.1e} of the "
                f"row's size, in {worst.stage}"
            )
        else:
            before = self.stages.index(first)
            if before:
                last = self.stages[before - 1]
                lines.append(f"  agree up to {last.stage} (error {last.error:.1e})")
            lines.append(f"  first difference: {first.describe()}")
        lines += [f"  not captured: {name}" for name in self.missing]
        return lines


def compare_stages(
    got: Stages,
    expected: Stages,
    *,
    rounded: Stages | None = None,
    first_near_tie: int | None = None,
) -> LayerReport:
    """Find the first stage that differs.

    Args:
        got: The server's.
        expected: The reference's, all stages.
        rounded: The reference's in BF16, for a BF16 server; sets the bounds.
        first_near_tie: Rows from this one on may differ and are not compared.

    Returns:
        The report.

    Raises:
        ValueError: If nothing was captured, or for another number of rows.
    """
    if not got:
        raise ValueError(
            "compare_stages: the dump holds no norm of the residual stream; start the server with "
            f"{DUMP_FLAG} and without fused all-reduce"
        )
    rows = len(next(iter(expected.values())))
    limit = rows if first_near_tie is None else first_near_tie
    stages = []
    for name, reference in expected.items():
        if name not in got:
            continue
        if got[name].shape != reference.shape:
            raise ValueError(
                f"compare_stages: {name} is {list(got[name].shape)}, expected "
                f"{list(reference.shape)}; no other request may run while hidden states are dumped"
            )
        allowed = FP32_BOUND
        if rounded is not None and limit:
            allowed = BF16_RATIO * float(_row_errors(rounded[name], reference)[:limit].max())
        errors = _row_errors(got[name], reference)[:limit]
        over = (~(errors <= allowed)).nonzero()
        worst = int(errors.nan_to_num(nan=float("inf")).argmax()) if limit else 0
        stages.append(
            StageDifference(
                stage=name,
                error=float(errors[worst]) if limit else 0.0,
                position=worst,
                allowed=allowed,
                first_position=int(over[0]) if len(over) else None,
            )
        )
    return LayerReport(
        prompt_tokens=rows,
        compared_positions=limit,
        stages=stages,
        missing=[name for name in expected if name not in got],
    )


def _row_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Largest error of each row over the root mean square of the expected row, ``[rows]``."""
    size = expected.float().square().mean(-1).sqrt().clamp(min=1e-12)
    return (got.float() - expected.float()).abs().amax(-1) / size


def check_layers(
    client: ServerClient,
    dump_directory: Path,
    oracle: Oracle,
    token_ids: Sequence[int],
    *,
    rounded: Oracle | None = None,
) -> LayerReport:
    """Send one prompt and compare the hidden states that the server writes.

    Args:
        client: A server that was started with ``--debug-tensor-dump-output-folder`` on this
            machine, and that nobody else uses.
        dump_directory: That folder.
        oracle: The reference.
        token_ids: The prompt.
        rounded: The reference in BF16, for a BF16 server.

    Returns:
        The report.

    Raises:
        RuntimeError: If the server writes no dump there.
    """
    before = set(_files(dump_directory))
    client.generate(token_ids, 1)
    passes = _read_prompt(dump_directory, before, list(token_ids))
    return compare_stages(
        dumped_stages(passes, _names(oracle)),
        reference_stages(oracle, token_ids),
        rounded=None if rounded is None else reference_stages(rounded, token_ids),
        first_near_tie=oracle.run(token_ids).first_near_tie(),
    )


def _files(directory: Path) -> list[Path]:
    """Dumps of the first rank; with drafts those of the target."""
    return sorted(
        path for path in directory.glob("**/TP0_PP0_*/Pass*.pt") if "draft" not in path.parts
    )


def _read_prompt(directory: Path, before: set[Path], token_ids: list[int]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        fresh = [path for path in _files(directory) if path not in before]
        passes: list[dict[str, Any]] = []
        seen: list[int] = []
        for path in fresh:
            try:
                dump = torch.load(path)
            except (EOFError, RuntimeError):
                # Still being written.
                break
            chunk = dump["model.forward_batch_info.input_ids"].tolist()
            if seen + chunk == token_ids[: len(seen) + len(chunk)]:
                passes.append(dump)
                seen += chunk
        if seen == token_ids:
            return passes
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"verify: {directory} got the hidden states of {len(seen)} of {len(token_ids)} "
                f"prompt tokens; start the server with {DUMP_FLAG} {directory}, one pipeline stage, "
                "and send it nothing else meanwhile"
            )
        time.sleep(0.1)
