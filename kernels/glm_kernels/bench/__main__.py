"""Measure the kernels beside their peers and append the rows.

A case whose gate fails is reported and not timed.

    python -m glm_kernels.bench --family indexer --out docs/bench
    python -m glm_kernels.bench --only "32x128k n6" --peers none --out rows
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import sys

import torch
import triton

from glm_kernels.bench import peers
from glm_kernels.bench.cases import FAMILIES, Case
from glm_kernels.bench.timing import cold_time_us, warm_time_us


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def measure(case: Case, with_peers: bool, commit: str) -> list[dict[str, object]]:
    """Gate and time a case.

    Args:
        case: what to run.
        with_peers: time the peers too.
        commit: of the measured sources.

    Returns:
        One row a peer, or one row without a peer.
    """
    error = case.error()
    time_us, cold_us = warm_time_us(case.run), cold_time_us(case.run)
    common = {"torch": torch.__version__, "triton": triton.__version__}
    base: dict[str, object] = {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "gpu": torch.cuda.get_device_name(),
        "time_us": round(time_us, 2),
        "cold_us": round(cold_us, 2),
        "bytes": case.bytes_moved,
        "flops": case.flops,
        "floor_us": round(case.floor_us, 2),
        "max_error": error,
        "commit": commit,
        "versions": common,
    }
    rows = []
    for name, build in case.peers.items() if with_peers else ():
        try:
            peer_us = warm_time_us(build())
        except Exception as problem:  # a peer that cannot run must not cost us our own row
            print(f"  {name}: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
            torch.cuda.synchronize()
            continue
        distribution = peers.DISTRIBUTIONS[name]
        versions = {**common, distribution: _version(distribution)}
        ratio = round(time_us / peer_us, 3)
        rows.append(
            {
                **base,
                "peer": name,
                "peer_time_us": round(peer_us, 2),
                "ratio": ratio,
                "versions": versions,
            }
        )
    return rows or [base]


def main() -> int:
    """Run the chosen families; 1 if a gate failed."""
    parser = argparse.ArgumentParser(
        prog="python -m glm_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--family", choices=sorted(FAMILIES), action="append", help="may be repeated; all if absent"
    )
    parser.add_argument("--peers", choices=("all", "none"), default="all", help="time them too")
    parser.add_argument("--only", default="", help="part of an op's or a shape's name")
    parser.add_argument("--commit", default="unknown", help="of the measured sources")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("docs/bench"),
        help="folder whose FAMILY.jsonl the rows are appended to (default docs/bench)",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure on; run it on a GPU")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for family in args.family or sorted(FAMILIES):
        with (args.out / f"{family}.jsonl").open("a") as sink:
            for case in FAMILIES[family]():
                if args.only not in f"{case.op} {case.shape}":
                    continue
                try:
                    rows = measure(case, args.peers == "all", args.commit)
                except RuntimeError as problem:
                    failed += 1
                    print(f"{case.op} {case.shape} {case.dtype}: {problem}", file=sys.stderr)
                    continue
                for row in rows:
                    sink.write(json.dumps(row) + "\n")
                    sink.flush()
                    beside = (
                        f"{row['peer']} {row['peer_time_us']} ratio {row['ratio']}"
                        if "peer" in row
                        else ""
                    )
                    label = f"{row['op']} {row['shape']} {row['dtype']}"
                    print(f"{label:42s} {row['time_us']:>9} cold {row['cold_us']:>9} {beside}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
