"""Text that is known beforehand, with drafts that a correct server accepts without exception.

    python -m tests.gpu.serving.accept --out FOLDER

A constructed checkpoint (`sglang-glm checkpoint --mtp-perfect attention`) says a walk whose every token
follows from its definition, and its MTP layer predicts that walk from the rows of its own cache. So each
server is judged by two figures: wrong tokens, which must be none, and tokens a round, which is the number of
draft tokens where the draft steps see the drafts before them. Prompts run from short to beyond index_topk, in
batches that fill a captured bucket, that are padded to one, and that exceed the largest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from sglang_glm.checkpoint.perfect_mtp import LIVE_TOKENS, next_live_token
from sglang_glm.checkpoint.spec import CheckpointSpec
from tests.gpu.serving.shapes import EAGLE, ENV, write_plugins
from tests.support.checkpoints import checkpoint
from tests.support.server import Server, ServerSpec

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--skip-tokenizer-init --sampling-backend pytorch --mem-fraction-static 0.3 "
    "--max-running-requests 24 --kv-cache-dtype fp8_e4m3 --cuda-graph-bs-decode 1 16 "
    "--cuda-graph-backend-prefill disabled"
)
_NAMED = (
    "--dsa-prefill-backend glm_sparse --dsa-decode-backend glm_sparse "
    "--dsa-topk-backend glm_exact --speculative-dsa-topk-backend glm_exact"
)
#: name -> (SGLANG_GLM_ENABLE, further flags)
SERVERS = {"stock": ("0", ""), "ours": ("1", ""), "named": ("1", _NAMED)}
BATCHES = (1, 16, 10, 20)
NEW_TOKENS = 61


def main() -> int:
    """Question each server; 1 when one of ours failed or said a wrong token."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--index-topk", type=int, default=2048)
    parser.add_argument("--flags", default=FLAGS)
    parser.add_argument("--ready-s", type=int, default=420)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.servers:
        outcome = run(arguments, name)
        print(f"{name:<8}{json.dumps(outcome)}", flush=True)
        with (arguments.out / "accept.jsonl").open("a") as rows:
            rows.write(json.dumps(row(arguments, name, outcome)) + "\n")
        failed += name != "stock" and bool(outcome.get("wrong_tokens", 1))
    return int(failed > 0)


def row(arguments: argparse.Namespace, name: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """What docs/bench/gpu_accept.jsonl keeps of one server."""
    return {
        "op": "tokens_per_round",
        "server": name,
        **outcome,
        "gpu": torch.cuda.get_device_name(),
        "index_topk": arguments.index_topk,
        "flags": f"{arguments.flags} {EAGLE} {SERVERS[name][1]}".strip(),
        "versions": {n: importlib.metadata.version(n) for n in ("sglang", "torch")},
        "commit": arguments.commit,
    }


def run(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Start one server and question it."""
    enable, flags = SERVERS[name]
    topk = str(arguments.index_topk)
    # Eight heads: what a rank of eight has of the model, and a tile that verify rows share.
    # Stock SGLang norms the MTP layer's input in a kernel that begins at 512 columns.
    shape = ("--heads", "8", "--hidden-size", "512", "--index-topk", topk)
    model = checkpoint("--mtp", "--mtp-perfect", "attention", *shape)
    spec = CheckpointSpec(
        num_nextn_predict_layers=1, mtp_perfect="attention", index_topk=arguments.index_topk
    )
    plugins = write_plugins(Path.home() / ".cache" / "glm_gpu_serving" / "plugins")
    paths = [str(plugins), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {
        **ENV,
        "PYTHONPATH": ":".join(path for path in paths if path),
        "SGLANG_GLM_ENABLE": enable,
    }
    server = None
    try:
        server = Server(
            ServerSpec(
                model=model,
                args=(*arguments.flags.split(), *EAGLE.split(), *flags.split()),
                env=tuple(env.items()),
            ),
            ready_timeout_s=arguments.ready_s,
        )
        return question(server, spec)
    except Exception as error:
        traceback.print_exc(limit=3, file=sys.stdout)
        return {"error": f"{type(error).__name__}: {str(error)[-3000:]}"}
    finally:
        if server is not None:
            kept = [line for line in server.log.splitlines() if "server_args=" not in line]
            (arguments.out / f"accept.{name}.log").write_text("\n".join(kept[-5000:]))
            server.stop()


def question(server: Server, spec: CheckpointSpec) -> dict[str, Any]:
    """Send every batch; count wrong tokens and tokens a verify round."""
    wrong = 0
    rounds: dict[str, float] = {}
    for batch in BATCHES:
        prompts = [walk_prompt(spec, batch, index) for index in range(batch)]
        body = {
            "input_ids": prompts,
            "sampling_params": {
                "temperature": 0,
                "ignore_eos": True,
                "max_new_tokens": NEW_TOKENS,
            },
        }
        response = server.post("/generate", **body)
        response.raise_for_status()
        lengths = []
        for ids, answer in zip(prompts, response.json(), strict=True):
            tokens = list(ids)
            for token in answer["output_ids"]:
                wrong += token != next_live_token(spec, tokens)
                tokens.append(token)
            meta = answer["meta_info"]
            # The first token is prefill's.
            lengths.append((meta["completion_tokens"] - 1) / meta["spec_verify_ct"])
        rounds[f"batch {batch}"] = round(sum(lengths) / len(lengths), 3)
    return {"wrong_tokens": wrong, "tokens_per_round": rounds}


def walk_prompt(spec: CheckpointSpec, batch: int, index: int) -> list[int]:
    """Live ids, of a length between 20 and twice index_topk, a page's end and index_topk among them."""
    lengths = (20, 63, 64, 65, 700, spec.index_topk - 3, spec.index_topk + 1, 2 * spec.index_topk)
    draw = random.Random(f"{batch} {index}")
    return [draw.randrange(LIVE_TOKENS) for _ in range(lengths[(index + batch) % len(lengths)])]


if __name__ == "__main__":
    raise SystemExit(main())
