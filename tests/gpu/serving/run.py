"""SGLang alone against SGLang with this package, on layers of GLM-5.3, on one GPU.

    python -m tests.gpu.serving.run --out FOLDER --configs fp8-mtp rank8-mtp
    python -m tests.gpu.serving.run --out FOLDER --configs bf16-mtp --only ours

Each configuration starts one server after the other, asks both the same prompts, and times decode steps
or verify rounds. A third server, `experts`, is not timed: it records which experts the same loads hit, which
`sglang-glm plan --compare` reads. What a server answered stays in `--state`, so that its peer may run in
another call.
Rows go to `FOLDER/gpu_serving.jsonl` (docs/bench/gpu_serving.jsonl keeps the published ones), flushed one
by one. A server that fails leaves its log there and the next one is tried. None is started that would
outlast `--budget-s`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.serving import experts, prefill
from tests.gpu.serving.shapes import CHUNK, COMPARISONS, ENV, TOP_K, write_model, write_plugins
from tests.gpu.serving.traffic import answers, compare, measure, memory_mib, prompts
from tests.support.server import Server, ServerSpec

ROOT = Path(__file__).parents[3]
SIDES = ("stock", "ours", "experts")


def main() -> int:
    """Run the chosen servers; 1 when one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", choices=COMPARISONS, default=["fp8-mtp"])
    parser.add_argument("--only", choices=SIDES, help="one server of each configuration")
    parser.add_argument(
        "--loads", nargs="+", type=checked_load, default=["30000x16", "120000x4"], metavar="LOAD"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path.home() / ".cache" / "glm_gpu_serving")
    parser.add_argument("--weights", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--max-position", type=int, default=262_144)
    parser.add_argument("--budget-s", type=int, default=560, help="start no server that ends later")
    parser.add_argument("--server-s", type=int, default=170, help="what a server is taken to need")
    parser.add_argument("--ready-s", type=int, default=400, help="patience with a server's start")
    parser.add_argument("--extra", default="", help="flags for every server")
    parser.add_argument(
        "--profile-prefill",
        action="store_true",
        help="also time the chunks of the longest prompt one by one, and trace the last",
    )
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.state.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    failed = 0
    timed = [(name, side) for name in arguments.configs for side in ("stock", "ours")]
    for name, side in [*timed, *((name, "experts") for name in arguments.configs)]:
        if arguments.only not in (None, side):
            continue
        if time.monotonic() - started + arguments.server_s > arguments.budget_s:
            print(f"== {name} {side} left out: the budget of {arguments.budget_s} s is spent")
            continue
        failed += not run_side(arguments, name, side)
    print_table(arguments)
    return int(failed > 0)


def checked_load(text: str) -> str:
    """A load as it is written: tokens of a prompt and prompts at once, `30000x16`."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not tokens and prompts such as 30000x16")
    return text


def run_side(arguments: argparse.Namespace, name: str, side: str) -> bool:
    """Start one server, question it and keep its answers; False when it failed."""
    server = None
    started = time.monotonic()
    print(f"== {name} {side}", flush=True)
    try:
        server = Server(spec_of(arguments, name, side), ready_timeout_s=arguments.ready_s)
        print(f"   ready after {server.ready_after_s:.0f} s", flush=True)
        ask = record_experts if side == "experts" else question
        result = ask(server, arguments, name, side)
        result["commit"] = arguments.commit
        result["ready_s"] = round(server.ready_after_s, 1)
        _state(arguments, name, side).write_text(json.dumps(result))
        keep_results(arguments)
        report(arguments, name)
        return True
    except Exception:
        traceback.print_exc(limit=3, file=sys.stdout)
        return False
    finally:
        if server is not None:
            kept = [line for line in server.log.splitlines() if "server_args=" not in line]
            (arguments.out / f"{name}.{side}.log").write_text("\n".join(kept[-5000:]))
            told = [line for line in kept if re.search(r"DSA |Capture .*end|sglang_glm", line)]
            print("\n".join(f"   | {line[:230]}" for line in told[:24]))
            server.stop()
        print(f"   {name} {side} took {time.monotonic() - started:.0f} s", flush=True)


def spec_of(arguments: argparse.Namespace, name: str, side: str) -> ServerSpec:
    """How the server is started; its plugins and model are written first."""
    comparison = COMPARISONS[name]
    model = write_model(
        arguments.state / f"{arguments.weights}_{comparison.heads}_{arguments.max_position}",
        comparison.heads,
        arguments.weights == "fp8",
        arguments.max_position,
    )
    paths = [
        str(write_plugins(arguments.state / "plugins")),
        str(ROOT),
        str(ROOT / "kernels"),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {
        **ENV,
        "PYTHONPATH": ":".join(path for path in paths if path),
        "SGLANG_GLM_ENABLE": "0" if side == "stock" else "1",
    }
    flags = (*comparison.flags(side), *arguments.extra.split())
    if side == "experts":
        flags = (*flags, *experts.FLAGS)
        env |= experts.environment(_records(arguments))
    return ServerSpec(model=str(model), args=flags, env=tuple(env.items()))


def question(server: Server, arguments: argparse.Namespace, name: str, side: str) -> dict[str, Any]:
    """Everything that is asked of one server."""
    result: dict[str, Any] = {"answers": answers(server)}
    server.flush_cache()
    result["again"] = answers(server)
    print(f"   own repeat: {json.dumps(compare(result['answers'], result['again']))}", flush=True)
    if side == "ours" and _state(arguments, name, "stock").exists():
        stock = json.loads(_state(arguments, name, "stock").read_text())
        result["against_stock"] = compare(stock["answers"], result["answers"])
        print(f"   against stock: {json.dumps(result['against_stock'])}", flush=True)
    for load in arguments.loads:
        context, batch = map(int, load.split("x"))
        result[load] = {**measure(server, context, batch), "memory_mib": memory_mib()}
        print(f"   {load}: {json.dumps(result[load])}", flush=True)
    if arguments.profile_prefill:
        longest = max(int(load.split("x")[0]) for load in arguments.loads)
        result["prefill"] = prefill.profile(server, longest, CHUNK)
        print(f"   prefill: {json.dumps(result['prefill'])}", flush=True)
    return result


def record_experts(
    server: Server, arguments: argparse.Namespace, name: str, side: str
) -> dict[str, Any]:
    """Experts hit under each load; the answers and times of this server count for nothing."""
    result = {}
    for load in arguments.loads:
        context, batch = map(int, load.split("x"))
        result[load] = experts.experts_hit(
            server,
            _records(arguments),
            prompts(context, batch),
            rows_per_request=COMPARISONS[name].rows_per_request,
            chunk=CHUNK,
            top_k=TOP_K,
        )
        print(f"   {load}: {json.dumps(result[load])}", flush=True)
    return result


def keep_results(arguments: argparse.Namespace) -> None:
    """Everything known so far in one file."""
    known = {
        path.name.removesuffix(".json"): json.loads(path.read_text())
        for path in arguments.state.glob("*.json")
    }
    (arguments.out / "results.json").write_text(json.dumps(known))


def report(arguments: argparse.Namespace, name: str) -> None:
    """Write the rows of a configuration anew, with the figures of every server that has run."""
    stock, ours, recorded = (_known(arguments, name, side) for side in SIDES)
    if not ours:
        return
    path = arguments.out / "gpu_serving.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["config"] != name]
    kept += [
        json.dumps(row_of(arguments, name, load, stock, ours, recorded))
        for load in arguments.loads
        if load in ours
    ]
    path.write_text("".join(f"{line}\n" for line in kept))


def row_of(
    arguments: argparse.Namespace, name: str, load: str, stock: dict, ours: dict, recorded: dict
) -> dict[str, Any]:
    """One line of `gpu_serving.jsonl`.

    Args:
        arguments: Of this call.
        name: Configuration.
        load: Tokens and prompts, `30000x16`.
        stock: What is known of SGLang alone; may be empty.
        ours: What is known with this package.
        recorded: What the recorder counted; may be empty, then the row names no experts.
    """
    hit = recorded.get(load, {})
    return {
        "op": "verify_round" if COMPARISONS[name].mtp else "decode_step",
        "config": name,
        "shape": load,
        "gpu": _gpu(),
        "ms_per_step": ours[load]["ms_per_step"],
        "peer": "sglang",
        "peer_ms": stock.get(load, {}).get("ms_per_step"),
        "ratio": _ratio(ours, stock, load, "ms_per_step"),
        "prefill_s": ours[load]["prefill_s"],
        "peer_prefill_s": stock.get(load, {}).get("prefill_s"),
        "tokens_per_step": ours[load]["tokens_per_step"],
        **{key: hit[key] for key in ("experts_hit", "prefill_experts_hit") if hit.get(key)},
        "memory_mib": ours[load]["memory_mib"],
        "peer_memory_mib": stock.get(load, {}).get("memory_mib"),
        "agreement": ours.get("against_stock"),
        "heads": COMPARISONS[name].heads,
        "flags": f"{' '.join(COMPARISONS[name].flags('ours'))} {arguments.extra}".strip(),
        "weights": arguments.weights,
        "versions": {n: importlib.metadata.version(n) for n in ("sglang", "torch")},
        "commit": ours.get("commit", "unknown"),
    }


def print_table(arguments: argparse.Namespace) -> None:
    """What is known of every configuration so far, one line a load."""
    print(f"\n{'config':<12}{'load':<12}{'stock ms':>10}{'ours ms':>10}{'ratio':>8}  agreement")
    for name in COMPARISONS:
        both = {side: _known(arguments, name, side) for side in ("stock", "ours")}
        for load in arguments.loads:
            stock, ours = (side.get(load, {}).get("ms_per_step") for side in both.values())
            if stock is None and ours is None:
                continue
            ratio = _ratio(both["ours"], both["stock"], load, "ms_per_step")
            agreement = both["ours"].get("against_stock") or {}
            words = " ".join(f"{k}={v}" for k, v in agreement.items() if k != "partings")
            print(f"{name:<12}{load:<12}{stock!s:>10}{ours!s:>10}{ratio!s:>8}  {words}")


def _ratio(result: dict, peer: dict, load: str, field: str) -> float | None:
    if load not in peer or load not in result:
        return None
    return round(result[load][field] / peer[load][field], 3)


def _known(arguments: argparse.Namespace, name: str, side: str) -> dict[str, Any]:
    path = _state(arguments, name, side)
    return json.loads(path.read_text()) if path.exists() else {}


def _records(arguments: argparse.Namespace) -> Path:
    return arguments.state / "expert_records"


def _state(arguments: argparse.Namespace, name: str, side: str) -> Path:
    return arguments.state / f"{name}.{arguments.weights}.{arguments.max_position}.{side}.json"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


if __name__ == "__main__":
    raise SystemExit(main())
