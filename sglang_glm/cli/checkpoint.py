"""``sglang-glm checkpoint``: write a random checkpoint with GLM-5.x's structure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.spec import FP8_EXCLUDABLE, CheckpointSpec
from sglang_glm.cli.progress import ProgressLine, in_megabytes

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Write a random checkpoint with the structure of GLM-5.x (MLA, sparse attention with full and
shared index layers, MoE, optionally an MTP layer) that SGLang and transformers both load.
The weights depend on the options alone; a directory that already holds the same checkpoint is
left as it is.

examples:
  sglang-glm checkpoint /tmp/glm-tiny
  sglang-glm checkpoint /tmp/glm-tiny --index-topk 8 --mtp
  sglang-glm checkpoint /tmp/glm-fp8 --fp8 --fp8-exclude shared_experts --mtp
  sglang-glm checkpoint /tmp/glm-perfect --mtp-perfect hidden --index-topk 16
  sglang-glm checkpoint /tmp/glm-talks --script 'Easy.</think>It is sunny in Paris.'
  sglang-glm checkpoint /tmp/glm-4 --layers 4 --indexer-types full,shared,full,shared
"""

# Option, field, help; the type is that of the field's default.
DIMENSIONS: tuple[tuple[str, str, str], ...] = (
    ("--layers", "num_hidden_layers", "decoder layers"),
    ("--hidden-size", "hidden_size", "residual width"),
    ("--vocab-size", "vocab_size", "rows of the embedding; the tokenizer uses at most these"),
    ("--heads", "num_attention_heads", "query heads"),
    ("--q-lora-rank", "q_lora_rank", "query latent width"),
    ("--kv-lora-rank", "kv_lora_rank", "key/value latent width; kernels expect 512"),
    ("--qk-nope-head-dim", "qk_nope_head_dim", "part of a head without RoPE"),
    ("--qk-rope-head-dim", "qk_rope_head_dim", "part of a head with RoPE; kernels expect 64"),
    ("--v-head-dim", "v_head_dim", "value head width"),
    ("--first-k-dense-replace", "first_k_dense_replace", "leading layers with a dense MLP"),
    ("--intermediate-size", "intermediate_size", "width of the dense MLPs"),
    ("--experts", "n_routed_experts", "routed experts of an MoE layer"),
    ("--experts-per-token", "num_experts_per_tok", "routed experts a token uses"),
    ("--shared-experts", "n_shared_experts", "shared experts of an MoE layer"),
    ("--moe-intermediate-size", "moe_intermediate_size", "width of one expert"),
    ("--routed-scaling-factor", "routed_scaling_factor", "factor on the routed experts' sum"),
    ("--n-group", "n_group", "expert groups"),
    ("--topk-group", "topk_group", "expert groups a token may choose from"),
    ("--index-topk", "index_topk", "positions that each query attends to"),
    ("--index-n-heads", "index_n_heads", "heads of the indexer"),
    ("--index-head-dim", "index_head_dim", "width of an index head; kernels expect 128"),
    ("--index-topk-freq", "index_topk_freq", "one full index layer in this many"),
    ("--index-skip-topk-offset", "index_skip_topk_offset", "leading full index layers"),
    ("--max-position-embeddings", "max_position_embeddings", "longest context"),
    ("--rope-theta", "rope_theta", "base of the rotary frequencies"),
    ("--rms-norm-eps", "rms_norm_eps", "epsilon of every RMSNorm, the latent norms included"),
    ("--seed", "seed", "seed of the weights"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments.

    Args:
        parser: The subcommand's parser.
    """
    parser.description = DESCRIPTION
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write")
    parser.add_argument(
        "--force", action="store_true", help="replace a non-empty DIR that is not ours"
    )

    shape = parser.add_argument_group("dimensions")
    defaults = {field.name: field.default for field in dataclasses.fields(CheckpointSpec)}
    for option, field, text in DIMENSIONS:
        default = defaults[field]
        shape.add_argument(
            option,
            dest=field,
            type=type(default),
            default=default,
            metavar="N",
            help=f"{text} (default {default})",
        )
    shape.add_argument(
        "--indexer-types",
        type=lambda text: tuple(text.split(",")),
        metavar="LIST",
        help="full or shared for each layer, by comma (default: by freq and offset)",
    )

    script = parser.add_argument_group("scripted model")
    script.add_argument(
        "--script",
        metavar="TEXT",
        help="say TEXT in every chat: reasoning, </think>, then the answer or a tool call",
    )
    script.add_argument(
        "--script-after-tool",
        metavar="TEXT",
        help="say this instead where the last message is a tool's response",
    )

    mtp = parser.add_argument_group("MTP layer")
    mtp.add_argument("--mtp", action="store_true", help="write one NextN layer")
    mtp.add_argument("--mtp-embed-tokens", action="store_true", help="repeat embed_tokens under it")
    mtp.add_argument(
        "--mtp-shared-head", action="store_true", help="repeat the output head under it"
    )
    mtp.add_argument(
        "--mtp-perfect",
        choices=("hidden", "attention"),
        default="no",
        help="construct target and MTP layer such that every draft token must be accepted; "
        "'attention' also needs the draft's own cache to be right and every drafted row in the selection",
    )

    fp8 = parser.add_argument_group("FP8")
    fp8.add_argument(
        "--fp8", action="store_true", help="e4m3 weights with one scale per 128 x 128 block"
    )
    fp8.add_argument(
        "--fp8-exclude",
        action="append",
        choices=FP8_EXCLUDABLE,
        default=[],
        metavar="PART",
        help=f"keep this part in BF16, may be repeated: {', '.join(FP8_EXCLUDABLE)}",
    )


def spec_from_arguments(arguments: argparse.Namespace) -> CheckpointSpec:
    """Build the spec that the options describe.

    Args:
        arguments: As parsed by a parser that :func:`configure` set up.

    Returns:
        The validated spec.

    Raises:
        ValueError: If the dimensions do not fit together.
    """
    values = {field: getattr(arguments, field) for _, field, _ in DIMENSIONS}
    return CheckpointSpec(
        **values,
        indexer_types=arguments.indexer_types,
        num_nextn_predict_layers=int(arguments.mtp or arguments.mtp_perfect != "no"),
        mtp_perfect=arguments.mtp_perfect,
        script=_script(arguments),
        nextn_embed_tokens=arguments.mtp_embed_tokens,
        nextn_shared_head=arguments.mtp_shared_head,
        fp8=arguments.fp8,
        fp8_exclude=tuple(sorted(set(arguments.fp8_exclude))),
    )


def _script(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.script_after_tool is None:
        return () if arguments.script is None else (arguments.script,)
    if arguments.script is None:
        raise ValueError("checkpoint: --script-after-tool needs --script as well")
    return (arguments.script, arguments.script_after_tool)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint.

    Args:
        arguments: As parsed by a parser that :func:`configure` set up.

    Returns:
        The exit status.
    """
    # torch loads here, so that --help and a wrong option answer at once.
    from sglang_glm.checkpoint.writer import write_checkpoint

    spec = spec_from_arguments(arguments)
    directory = arguments.directory.resolve()
    written = write_checkpoint(
        spec, directory, force=arguments.force, progress=ProgressLine(in_megabytes)
    )
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    full = [i for i, kind in enumerate(spec.layer_indexer_types) if kind == "full"]
    state = "wrote" if written else "already there:"
    print(f"{state} {directory} ({size / 1e6:.1f} MB)")
    print(
        f"  {spec.num_hidden_layers} layers, full index layers {full}, "
        f"index_topk {spec.index_topk}, MTP layers {spec.num_nextn_predict_layers}, "
        f"weights {'FP8' if spec.fp8 else 'BF16'}"
    )
    return 0
