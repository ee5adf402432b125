"""One model behind three expert exchanges on several GPUs: DeepEP in both forms and the portable all-to-all.

    python -m tests.gpu.parallel.serve --out FOLDER --commit HASH

Real servers of a few GLM-5.3 layers with all 256 experts (random FP8 weights, the same for all) over all GPUs
(`--gpus`), requests and experts divided over the ranks. All start at once. Each is asked the same greedy
prompts, one by one, so that other ranks are idle, and together; its answers are held against those of a
peer, the portable server. Then batches are timed, one server after the other. A row a server and load
goes to `FOLDER/parallel.jsonl`, at once.

`--servers portable_mtp deepep_mtp` does it with drafts; `--servers scan_whole scan_divided` compares
selections by every rank and divided over the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.parallel.measure import ENVIRONMENT
from tests.gpu.parallel.ranks import installed
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
_BY_REQUEST = "--tp {n} --attn-dp-size {n} --ep-size {n}"
_VERIFY = (
    f"--tp {{n}} {EAGLE} --dsa-topk-backend glm_exact --speculative-dsa-topk-backend glm_exact"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One server.

    Attributes:
        flags: What sets it apart, on n GPUs.
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
    "portable_mtp": Form(flags=f"{_BY_REQUEST} {EAGLE} --moe-a2a-backend glm_a2a"),
    "deepep_mtp": Form(
        flags=f"{_BY_REQUEST} {EAGLE} --moe-a2a-backend deepep --deepep-mode auto",
        peer="portable_mtp",
    ),
    "scan_whole": Form(flags=_VERIFY),
    "scan_divided": Form(
        flags=_VERIFY, peer="scan_whole", env=(("SGLANG_GLM_DIVIDE_INDEX_SCAN", "on"),)
    ),
}
DEFAULT = ("portable", "deepep_normal", "deepep_auto")
COMPARED = (40, 700, 2100, 5000)
#: An odd number over the ranks, one of them long.
TOGETHER = (40, 60, 3000, 80, 700)


def main() -> int:
    """Start, question and stop the servers; 1 when one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[*DEFAULT])
    parser.add_argument("--loads", nargs="+", default=["1000x2", "1000x16"])
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ready-s", type=int, default=420, help="patience with the starts")
    parser.add_argument("--extra", default="", help="flags for every server")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.gpus is None:
        arguments.gpus = torch.cuda.device_count()
    support.READY_TIMEOUT_S = arguments.ready_s
    specs = {name: spec_of(arguments, name) for name in arguments.servers}
    compared: dict[str, dict[str, Any]] = {}
    failed = 0
    # A thread that starts a server lives as long as it: the kernel ends children with their thread.
    with ThreadPoolExecutor(len(arguments.servers)) as pool:
        starting = {name: pool.submit(start, spec) for name, spec in specs.items()}
        for step in (ask, time_loads):
            for name, started in starting.items():
                if started.done() and started.exception() is not None and step is time_loads:
                    continue
                try:
                    step(arguments, name, started.result(), compared)
                except Exception:
                    failed += 1
                    print(f"== {name}: failed", flush=True)
                    traceback.print_exc(limit=3, file=sys.stdout)
        for name, started in starting.items():
            if started.exception() is None:
                keep_log(arguments, name, started.result())
                started.result().stop()
    return int(failed > 0)


def start(spec: ServerSpec) -> Server:
    """Start a server and ask it once: kernels are compiled by then, those of all servers at a time.

    Raises:
        RuntimeError: it did not start or did not answer; with the end of its log.
    """
    server = Server(spec)
    try:
        answers(server, COMPARED)
        answers(server, TOGETHER, together=True)
        server.flush_cache()
    except Exception as error:
        server.stop()
        raise RuntimeError(f"{error}\n{server.tail()}") from error
    return server


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
    plugins = write_plugins(state / "plugins")
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
    own = SERVERS[name].flags.format(n=arguments.gpus)
    return f"{FLAGS} {own} {arguments.extra}".split()


def ask(
    arguments: argparse.Namespace, name: str, server: Server, compared: dict[str, dict[str, Any]]
) -> None:
    """Ask one server all prompts, and hold its answers against its peer's."""
    print(f"== {name}: ready after {server.ready_after_s:.0f} s", flush=True)
    said = {
        "alone": answers(server, COMPARED),
        "together": answers(server, TOGETHER, together=True),
    }
    server.flush_cache()
    agreement = {"own_repeat": compare(said["alone"], answers(server, COMPARED))}
    peer = arguments.out / f"{SERVERS[name].peer}.answers.json"
    if peer.exists():
        told = json.loads(peer.read_text())
        agreement |= {how: compare(told[how], said[how]) for how in said}
    (arguments.out / f"{name}.answers.json").write_text(json.dumps(said))
    compared[name] = agreement
    for how, found in agreement.items():
        print(f"   {how}: {json.dumps(found)}", flush=True)


def time_loads(
    arguments: argparse.Namespace, name: str, server: Server, compared: dict[str, dict[str, Any]]
) -> None:
    """Time every load on one server, and append its rows."""
    for load in arguments.loads:
        context, batch = map(int, load.split("x"))
        times = measure(server, context, batch)
        print(f"{name} {load}: {json.dumps(times)}", flush=True)
        row = {
            "op": "serve",
            "form": name,
            "shape": f"{LAYERS} layers, {EXPERTS} experts, {load}",
            "gpu": f"{arguments.gpus}x {torch.cuda.get_device_name()}",
            **times,
            "peer": SERVERS[name].peer,
            "agreement": compared.get(name),
            "ready_s": round(server.ready_after_s, 1),
            "flags": " ".join(flags(arguments, name)),
            "versions": installed("sglang", "torch", "sgl-deep-ep"),
            "commit": arguments.commit,
        }
        with (arguments.out / "parallel.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")


def keep_log(arguments: argparse.Namespace, name: str, server: Server) -> None:
    """Keep the end of what a server printed."""
    kept = [line for line in server.log.splitlines() if "server_args=" not in line]
    (arguments.out / f"{name}.log").write_text("\n".join(kept[-5000:]))


if __name__ == "__main__":
    raise SystemExit(main())
