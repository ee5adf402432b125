"""One model behind three expert exchanges on two GPUs: DeepEP in both forms and the portable all-to-all.

    python -m tests.gpu.parallel.serve --out FOLDER --commit HASH

Real servers of a few GLM-5.3 layers with all 256 experts (random FP8 weights, the same for all), TP 2 with
attention data parallelism over both ranks and the experts divided over both. All start at once, then
each is asked alone: the same greedy prompts one by one, so that a rank is idle, and timed batches. Answers
are held against those of a peer, the portable server. A row a server and load goes to
`FOLDER/parallel.jsonl`, at once.

`--servers scan_whole scan_divided` compares verify rows selected by every rank and divided by request.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.parallel.measure import ENVIRONMENT
from tests.gpu.serving.shapes import EAGLE, ENV, write_model, write_plugins
from tests.gpu.serving.traffic import answers, compare, measure
from tests.support import server as support
from tests.support.server import Server, ServerSpec

ROOT = Path(__file__).parents[3]
LAYERS, DENSE_LAYERS, EXPERTS = 4, 1, 256
MAX_POSITION = 131_072
FLAGS = (
    "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --kv-cache-dtype fp8_e4m3 "
    "--mem-fraction-static 0.8 --max-total-tokens 200000 --max-running-requests 32 "
    "--chunked-prefill-size 4096 --cuda-graph-bs-decode 8 --cuda-graph-backend-prefill disabled "
    # Both of these all-reduces may use NVLink multicast.
    "--disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion --skip-server-warmup"
)
_BY_REQUEST = "--tp 2 --attn-dp-size 2 --ep-size 2"
_VERIFY = f"--tp 2 {EAGLE} --dsa-topk-backend glm_exact --speculative-dsa-topk-backend glm_exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One server.

    Attributes:
        flags: What sets it apart.
        peer: Name of the server whose answers it has to give; None for such a peer.
        env: Its variables.
    """

    flags: str
    peer: str | None = None
    env: tuple[tuple[str, str], ...] = ()


SERVERS = {
    "portable": Form(flags=f"{_BY_REQUEST} --moe-a2a-backend glm_a2a"),
    "deepep_normal": Form(
        flags=f"{_BY_REQUEST} --moe-a2a-backend deepep --deepep-mode normal", peer="portable"
    ),
    "deepep_auto": Form(
        flags=f"{_BY_REQUEST} --moe-a2a-backend deepep --deepep-mode auto", peer="portable"
    ),
    "gathered": Form(flags=_BY_REQUEST, peer="portable"),
    "scan_whole": Form(flags=_VERIFY),
    "scan_divided": Form(
        flags=_VERIFY, peer="scan_whole", env=(("SGLANG_GLM_DIVIDE_INDEX_SCAN", "on"),)
    ),
}
DEFAULT = ("portable", "deepep_normal", "deepep_auto")
COMPARED = (40, 700, 2100, 5000)


def main() -> int:
    """Start, question and stop the servers; 1 when one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[*DEFAULT])
    parser.add_argument("--loads", nargs="+", default=["1000x2", "1000x16"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ready-s", type=int, default=420, help="patience with the starts")
    parser.add_argument("--extra", default="", help="flags for every server")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    support.READY_TIMEOUT_S = arguments.ready_s
    known: dict[str, list[dict[str, Any]]] = {}
    failed = 0
    # A thread that starts a server lives as long as it: the kernel ends children with their thread.
    with ThreadPoolExecutor(len(arguments.servers)) as pool:
        starting = {
            name: pool.submit(Server, spec_of(arguments, name)) for name in arguments.servers
        }
        for name, started in starting.items():
            try:
                server = started.result()
                print(f"== {name}: ready after {server.ready_after_s:.0f} s", flush=True)
                question(arguments, name, server, known)
            except Exception:
                failed += 1
                print(f"== {name}: failed", flush=True)
                traceback.print_exc(limit=3, file=sys.stdout)
        for name, started in starting.items():
            if started.exception() is None:
                keep_log(arguments, name, started.result())
                started.result().stop()
    return int(failed > 0)


def spec_of(arguments: argparse.Namespace, name: str) -> ServerSpec:
    """How a server is started; its model and plugins are written first."""
    state = arguments.out / "state"
    model = write_model(
        state / "model",
        64,
        True,
        MAX_POSITION,
        layers=LAYERS,
        dense_layers=DENSE_LAYERS,
        experts=EXPERTS,
    )
    plugins = write_plugins(
        state / "plugins", glm_no_network="tests.gpu.parallel.no_network:register"
    )
    paths = [str(plugins), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {
        **ENV,
        **ENVIRONMENT,
        "PYTHONPATH": ":".join(path for path in paths if path),
        # The others are loading their weights at the same time.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        **dict(SERVERS[name].env),
    }
    return ServerSpec(model=str(model), args=tuple(flags(arguments, name)), env=tuple(env.items()))


def flags(arguments: argparse.Namespace, name: str) -> list[str]:
    """Everything on a server's command line but its model and port."""
    return f"{FLAGS} {SERVERS[name].flags} {arguments.extra}".split()


def question(
    arguments: argparse.Namespace,
    name: str,
    server: Server,
    known: dict[str, list[dict[str, Any]]],
) -> None:
    """Ask one server everything, and append its rows."""
    started = time.monotonic()
    known[name] = answers(server, COMPARED)
    (arguments.out / f"{name}.answers.json").write_text(json.dumps(known[name]))
    server.flush_cache()
    again = compare(known[name], answers(server, COMPARED))
    print(f"   own repeat: {json.dumps(again)}", flush=True)
    peer = SERVERS[name].peer
    agreement = compare(known[peer], known[name]) if peer in known else None
    print(f"   against {peer}: {json.dumps(agreement)}", flush=True)
    for load in arguments.loads:
        context, batch = map(int, load.split("x"))
        times = measure(server, context, batch)
        print(f"   {load}: {json.dumps(times)}", flush=True)
        row = {
            "op": "serve",
            "form": name,
            "shape": f"{LAYERS} layers, {EXPERTS} experts, {load}",
            "gpu": _gpus(),
            **times,
            "agreement": agreement,
            "peer": peer,
            "own_repeat": again,
            "ready_s": round(server.ready_after_s, 1),
            "flags": " ".join(flags(arguments, name)),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("sglang", "torch", "sgl-deep-ep")
            },
            "commit": arguments.commit,
        }
        with (arguments.out / "parallel.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
    print(f"   took {time.monotonic() - started:.0f} s", flush=True)


def keep_log(arguments: argparse.Namespace, name: str, server: Server) -> None:
    """Keep the end of what a server printed."""
    kept = [line for line in server.log.splitlines() if "server_args=" not in line]
    (arguments.out / f"{name}.log").write_text("\n".join(kept[-5000:]))


def _gpus() -> str:
    import torch

    return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    raise SystemExit(main())
