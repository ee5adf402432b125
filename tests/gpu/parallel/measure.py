"""Expert exchange, collectives and the divided index scan on all GPUs of a machine.

    python tests/gpu/parallel/measure.py --commit HASH

Every part runs in processes of its own, one per GPU, so that one which fails or hangs costs no other
its rows. Prints DeepEP's probe first and a table last; appends rows to docs/bench/parallel.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

#: In this order: the module whose `run(ranks)` a part calls.
PARTS = {
    "deepep_normal": "deepep_normal_part",
    "deepep_low_latency": "deepep_low_latency_part",
    "portable": "portable_part",
    "index_scan": "index_scan_part",
    "collectives": "collectives_part",
}
TOTAL_S, PART_S = 200, 45

#: NVLink multicast can put a shared host's GPUs out of service where it is not set up.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DEBUG": "WARN",
    "PYTHONUNBUFFERED": "1",
}


def use_this_checkout() -> None:
    """Import this checkout's packages, whatever else is installed under their names."""
    root = Path(__file__).resolve().parents[3]
    sys.path[:0] = [str(root), str(root / "kernels")]
    # A folder without __init__ loses against any installed distribution that brings `tests` along.
    tests = types.ModuleType("tests")
    tests.__path__ = [str(root / "tests")]
    sys.modules["tests"] = tests


def run_rank(part: str, rows_path: Path, device: str, commit: str, limit_s: float) -> None:
    """One rank of one part, in the process group that the environment describes."""
    # Where it hangs shows in its log before it is ended from outside.
    faulthandler.dump_traceback_later(max(1.0, limit_s - 3), exit=True)
    import torch
    import torch.distributed as dist

    from tests.gpu.parallel.ranks import Ranks, installed

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"timeout": datetime.timedelta(seconds=30)}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)
    if device == "cuda" and rank == 0:
        peers = [torch.cuda.can_device_access_peer(0, peer) for peer in range(1, world_size)]
        print(f"probe: {torch.cuda.get_device_name()}, peer access {peers}", flush=True)
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        device=device,
        rows_path=rows_path,
        commit=commit,
        versions=installed("torch", "sgl-deep-ep", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
    )
    importlib.import_module(f"tests.gpu.parallel.{PARTS[part]}").run(ranks)
    dist.barrier()
    ranks.say("done")
    # The others' last collective may still read this rank's memory.
    time.sleep(0.5)
    # Communicators and buffers are ended by the kernel: their own teardown may hang.
    os._exit(0)


def run_part(part: str, args: argparse.Namespace, limit_s: float) -> str:
    """Start every rank of a part and wait for them.

    Returns:
        "ok", or in a few words what happened.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--part", part]
    command += ["--device", args.device, "--commit", args.commit, "--limit", str(limit_s)]
    command += ["--rows", str(args.logs / f"{part}.jsonl")]
    (args.logs / f"{part}.jsonl").unlink(missing_ok=True)
    children = []
    for rank in range(args.gpus):
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.gpus),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with (args.logs / f"{part}.{rank}.log").open("w") as log:
            children.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.1)
    # A rank that failed leaves the others waiting; give them a moment to say so.
    time.sleep(0.5)
    codes = [child.poll() for child in children]
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
    if all(code == 0 for code in codes):
        return "ok"
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        return (
            f"rank {rank} ended with {codes[rank]}: {last_words(args.logs / f'{part}.{rank}.log')}"
        )
    return f"no end after {limit_s:.0f} s: {last_words(args.logs / f'{part}.0.log')}"


def last_words(log: Path) -> str:
    """A kernel's failed assertion, or else the last line of a log, cut."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("Assertion failed")]
    return (failed or lines or ["it printed nothing"])[-1][:200]


def read_rows(path: Path) -> list[dict]:
    """Rows of a part, complete lines only."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def table(rows: list[dict]) -> str:
    """Rows as text, measured beside predicted; of a divided scan what it saves, beside predicted."""
    lines = [
        f"{'op':14} {'form':25} {'shape':34} {'dtype':5} {'launch':6} {'us':>9} {'pred us':>9} "
        f"{'plan us':>8} {'MB':>8} {'pred MB':>8} {'link MB':>8} error"
    ]
    for row in rows:
        predicted_us = row.get("predicted_us", "")
        if row["op"] == "index_scan":
            predicted_us = f"{row['saved_us']:+.0f}/{row['predicted_saved_us']:+.0f}"
        size, predicted_size, counted = (
            f"{row[key] / 1e6:.2f}" if row.get(key) is not None else ""
            for key in ("bytes", "predicted_bytes", "link_bytes")
        )
        lines.append(
            f"{row['op']:14} {row['form']:25} {row['shape']:34} {row['dtype']:5} {row['launch']:6} "
            f"{row['time_us']:>9} {predicted_us:>9} {row.get('plan_us', ''):>8} {size:>8} "
            f"{predicted_size:>8} {counted:>8} {row['max_error']:.1e}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the parts; 1 when one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--only", choices=[*PARTS], action="append")
    parser.add_argument("--out", type=Path, default=Path("docs/bench/parallel.jsonl"))
    parser.add_argument("--logs", type=Path, default=Path("parallel_logs"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a try over gloo"
    )
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=PART_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_rank(args.part, args.rows, args.device, args.commit, args.limit)
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    args.logs.mkdir(parents=True, exist_ok=True)
    started, rows, outcomes = time.monotonic(), [], {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for part in args.only or PARTS:
        left_s = TOTAL_S - (time.monotonic() - started)
        part_started = time.monotonic()
        if left_s < 10:
            outcomes[part] = "not started: the time is used up"
            continue
        outcomes[part] = run_part(part, args, min(PART_S, left_s))
        found = read_rows(args.logs / f"{part}.jsonl")
        rows += found
        with args.out.open("a") as sink:
            sink.writelines(json.dumps(row) + "\n" for row in found)
        seconds = time.monotonic() - part_started
        print(f"{part} ({seconds:.0f} s): {outcomes[part]}", flush=True)
        log = (args.logs / f"{part}.0.log").read_text(errors="replace")
        for line in log.splitlines():
            if line.startswith("probe:"):
                print(f"  {line}", flush=True)
    print(table(rows))
    for part, outcome in outcomes.items():
        print(f"{part}: {outcome}")
    return int(any(outcome != "ok" for outcome in outcomes.values()))


if __name__ == "__main__":
    use_this_checkout()
    sys.exit(main())
