"""`sglang-glm plan`: what a model costs on given GPUs, and the flags to launch it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_glm.planning import hardware, measured, measured_rows, picture, report
from sglang_glm.planning.expert_record import RecordedPasses, read_passes
from sglang_glm.planning.experts import MeasuredHistogram, RecordedHits, UniformRouting
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.plan import DEFAULT_ACCEPT_LENGTH, Plan, Workload, build_plan
from sglang_glm.planning.released import RELEASED, load_config
from sglang_glm.planning.speculation import MtpShape
from sglang_glm.planning.traffic import ModelSetup
from sglang_glm.planning.weights import checkpoint_precision

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.experts import Routing
    from sglang_glm.planning.kv_cache import KvDtype

_EXAMPLES = """\
examples:
  one node of H200, attention by request, experts by DeepEP, MTP 5-1-6:
    sglang-glm plan zai-org/GLM-5.3 --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 \\
        --context 32k --concurrency 64
  lowest latency, plain tensor parallelism:
    sglang-glm plan zai-org/GLM-5.3 --gpu h200 --tp 8 --concurrency 4
  1M tokens a request, latent rows spread over the ranks:
    sglang-glm plan zai-org/GLM-5.3 --gpu h200 --tp 8 --ep 8 --dcp-size 8 --context 1m \\
        --chunked-prefill-size 4096
  a checkpoint of your own, for a script, with a picture:
    sglang-glm plan ./checkpoint/config.json --gpu b200 --tp 4 --json --picture plan.svg
  with the experts that a server of this layout really hit:
    sglang-glm plan zai-org/GLM-5.3 --gpu h200 --tp 8 --expert-record recorder.pt
  how far the plan was from measured servers:
    sglang-glm plan --compare rows.jsonl
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Memory, traffic and time of a glm_moe_dsa model on given GPUs, without GPUs, weights or network."
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "model",
        nargs="?",
        help="config.json, checkpoint folder, or one of " + ", ".join(RELEASED),
    )
    parser.add_argument("--gpu", default="h200", help=", ".join(hardware.GPUS))
    layout = parser.add_argument_group("layout (names as in SGLang)")
    layout.add_argument("--tp", "--tp-size", type=int, default=8, help="GPUs of the replica")
    layout.add_argument(
        "--attn-dp-size", type=int, default=1, help="attention groups with different requests"
    )
    layout.add_argument("--ep", "--ep-size", type=int, default=1, help="expert-parallel groups")
    layout.add_argument(
        "--dcp-size", type=int, default=1, help="ranks that share a request's latent rows"
    )
    layout.add_argument(
        "--moe-a2a-backend",
        choices=("auto", "none", "deepep"),
        default="auto",
        help="auto: deepep with attention DP and one expert group per GPU",
    )
    layout.add_argument("--moe-dense-tp-size", type=int, choices=(1,), help="copy the dense MLPs")
    layout.add_argument(
        "--enable-dp-lm-head", action="store_true", help="head split within attention groups"
    )
    layout.add_argument("--gpus-per-node", type=int, default=8, help="GPUs on the fast link")
    layout.add_argument(
        "--link-gb-per-s", type=float, help="one direction of a GPU's fast link (450 for NVLink 4)"
    )
    layout.add_argument(
        "--network-gb-per-s", type=float, help="one direction of a GPU's share of the network (50)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--context", type=parse_tokens, default=131_072, help="tokens a request: 131072, 128k, 1m"
    )
    load.add_argument("--concurrency", type=int, default=32, help="requests decoding at once")
    load.add_argument(
        "--chunked-prefill-size",
        type=parse_tokens,
        help="prefill tokens a step, over all groups (8k; 16k on b200)",
    )
    load.add_argument("--mtp-steps", type=int, help="draft steps, 0 for none (5 with an MTP layer)")
    load.add_argument(
        "--accept-length",
        type=float,
        help="tokens an MTP round yields, for the speed row (3.5, or as many as it can)",
    )
    load.add_argument(
        "--shared-verify-reads",
        action="store_true",
        help="index keys are read once for all verify rows of a request",
    )
    formats = parser.add_argument_group("formats and routing")
    formats.add_argument(
        "--weights", choices=("checkpoint", "bf16", "fp8"), default="checkpoint", help="storage"
    )
    formats.add_argument(
        "--kv-cache-dtype", choices=("fp8_e4m3", "bfloat16"), default="fp8_e4m3", help="KV rows"
    )
    routing = formats.add_mutually_exclusive_group()
    routing.add_argument(
        "--experts-hit", type=float, help="experts hit per MoE layer and step, as recorded"
    )
    routing.add_argument(
        "--expert-histogram", type=Path, help='JSON {"layer_id": [count per expert, …]}'
    )
    routing.add_argument(
        "--expert-record",
        type=Path,
        metavar="FILE.pt",
        help="what SGLang's expert recorder counted on a server of this layout, mode stat",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        type=Path,
        metavar="ROWS.jsonl",
        help="instead of a plan: predicted beside measured milliseconds of server rows",
    )
    output.add_argument("--json", action="store_true", help="print the plan as JSON")
    output.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.svg|.png",
        help="draw memory and time; in characters without matplotlib",
    )


def parse_tokens(text: str) -> int:
    """Read `131072`, `128k` (times 1,024) or `1m` (times 1,048,576)."""
    factors = {"k": 1024, "m": 1024 * 1024}
    digits, factor = text, 1
    if text[-1:].lower() in factors:
        digits, factor = text[:-1], factors[text[-1].lower()]
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 8192 or 128k")
    return int(digits) * factor


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ValueError: the model, the layout or the load is impossible; says why in one sentence.
    """
    if args.compare is not None:
        return _compare(args)
    if args.model is None:
        raise ValueError("plan: got no model, expected a config.json or " + next(iter(RELEASED)))
    if args.picture is not None:
        picture.check_path(args.picture)
    plan = make_plan(args)
    accept_length = _accept_length(plan, args.accept_length)
    if args.picture is not None:
        _write_picture(plan, args)
    if args.json:
        print(json.dumps(report.plan_to_dict(plan, args.model), indent=2))
    else:
        print(report.render_text(plan, args.model, accept_length=accept_length))
    return 0


def _accept_length(plan: Plan, given: float | None) -> float:
    longest = plan.workload.mtp.max_accept_length if plan.workload.mtp is not None else 1
    if given is None:
        return min(DEFAULT_ACCEPT_LENGTH, longest)
    if not 1 <= given <= longest:
        raise ValueError(
            f"plan: accept_length is {given:g}, expected from 1 to {longest}, the tokens that a round "
            "can yield; change it or --mtp-steps"
        )
    return given


def _compare(args: argparse.Namespace) -> int:
    predictions = [measured.predict(row) for row in measured_rows.read_rows(args.compare)]
    if args.json:
        print(json.dumps([item.to_dict() for item in predictions], indent=2))
    else:
        print(measured.render(predictions, report.NOT_MODELLED))
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Turn parsed arguments into a plan.

    Raises:
        ValueError: If the model, the layout or the load is impossible.
    """
    config = load_config(args.model)
    gpu = _gpu_with_links(args)
    by_request = args.attn_dp_size > 1 and args.ep == args.tp
    deepep = args.moe_a2a_backend == "deepep" or (args.moe_a2a_backend == "auto" and by_request)
    layout = ParallelLayout(
        tp_size=args.tp,
        attn_dp_size=args.attn_dp_size,
        ep_size=args.ep,
        dcp_size=args.dcp_size,
        moe_dispatch="all_to_all" if deepep else "none",
        dense_mlp_replicated=args.moe_dense_tp_size == 1,
        lm_head_per_attn_group=args.enable_dp_lm_head,
        gpus_per_node=args.gpus_per_node,
    )
    # TRT-LLM kernels, SGLang's choice for FP8 rows on Blackwell, read plain FP8.
    fp8_rows: KvDtype = "fp8_plain" if gpu.architecture == "blackwell" else "fp8_packed"
    setup = ModelSetup(
        config=config,
        layout=layout,
        precision=checkpoint_precision(config) if args.weights == "checkpoint" else args.weights,
        kv_dtype="bf16" if args.kv_cache_dtype == "bfloat16" else fp8_rows,
        routing=_routing(args, config, layout),
    )
    chunk_tokens = args.chunked_prefill_size
    if chunk_tokens is None:
        chunk_tokens = 16384 if gpu.architecture == "blackwell" else 8192
    workload = Workload(
        context_tokens=args.context,
        concurrency=args.concurrency,
        chunk_tokens=chunk_tokens,
        mtp=_mtp(args, config),
        rows_share_index_keys=args.shared_verify_reads,
    )
    return build_plan(setup, gpu, workload)


def _gpu_with_links(args: argparse.Namespace) -> hardware.Gpu:
    gpu = hardware.find_gpu(args.gpu)
    for option, gb_per_s in (("link", args.link_gb_per_s), ("network", args.network_gb_per_s)):
        if gb_per_s is not None and not 0 < gb_per_s < math.inf:
            raise ValueError(f"plan: {option}_gb_per_s is {gb_per_s:g}, expected more than 0")
    if args.link_gb_per_s is not None:
        gpu = replace(gpu, link_bytes_per_s=1e9 * args.link_gb_per_s)
    if args.network_gb_per_s is not None:
        gpu = replace(gpu, network_bytes_per_s=1e9 * args.network_gb_per_s)
    return gpu


def _routing(args: argparse.Namespace, config: GlmDsaConfig, layout: ParallelLayout) -> Routing:
    if args.expert_record is not None:
        return RecordedPasses(tuple(read_passes(args.expert_record, config, layout)))
    if args.expert_histogram is not None:
        return MeasuredHistogram.from_json(args.expert_histogram, config)
    if args.experts_hit is not None:
        if not 0 < args.experts_hit <= config.n_routed_experts:
            raise ValueError(
                f"plan: experts_hit is {args.experts_hit:g}, expected more than 0 and at most "
                f"n_routed_experts={config.n_routed_experts}"
            )
        return RecordedHits(args.experts_hit)
    return UniformRouting()


def _mtp(args: argparse.Namespace, config: GlmDsaConfig) -> MtpShape | None:
    steps = args.mtp_steps
    if steps is None:
        steps = 5 if config.mtp_layer_id is not None else 0
    return None if steps == 0 else MtpShape(num_steps=steps, num_draft_tokens=steps + 1)


def _write_picture(plan: Plan, args: argparse.Namespace) -> None:
    if picture.has_matplotlib():
        picture.draw(plan, args.model, args.picture)
        print(f"wrote {args.picture}", file=sys.stderr)
        return
    print(picture.text_picture(plan), file=sys.stderr)
    print(
        f"{args.picture} was not written: matplotlib is not installed (pip install '.[plot]')",
        file=sys.stderr,
    )
