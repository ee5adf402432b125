"""Compares what a running server allocated with what its command line asked for.

    python launch/check_allocated.py URL [--min-kv-tokens N] [--FLAG=VALUE ...]

SGLang lowers, rounds and replaces arguments while it starts, and says so in one line among a
thousand. This reads `/server_info` and ends with 1, naming the argument, when something that was
asked for is not so. It needs nothing but Python.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

#: Arguments that `/server_info` repeats as it resolved them, by their names there.
COMPARED = {
    "--tp-size": "tp_size",
    "--pp-size": "pp_size",
    "--attn-dp-size": "attn_dp_size",
    "--ep-size": "ep_size",
    "--dcp-size": "dcp_size",
    "--moe-a2a-backend": "moe_a2a_backend",
    "--moe-dense-tp-size": "moe_dense_tp_size",
    "--enable-dp-lm-head": "enable_dp_lm_head",
    "--dtype": "dtype",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--attention-backend": "attention_backend",
    "--dsa-prefill-backend": "dsa_prefill_backend",
    "--dsa-decode-backend": "dsa_decode_backend",
    "--dsa-topk-backend": "dsa_topk_backend",
    "--context-length": "context_length",
    "--chunked-prefill-size": "chunked_prefill_size",
    "--max-running-requests": "max_running_requests",
    "--speculative-algorithm": "speculative_algorithm",
    "--speculative-num-steps": "speculative_num_steps",
    "--speculative-eagle-topk": "speculative_eagle_topk",
    "--speculative-num-draft-tokens": "speculative_num_draft_tokens",
    "--disaggregation-mode": "disaggregation_mode",
    "--disaggregation-transfer-backend": "disaggregation_transfer_backend",
}

#: Asked for over all attention groups, reported for one.
PER_GROUP = ("--max-running-requests", "--chunked-prefill-size")


def differences(
    asked: dict[str, str], info: dict[str, Any], min_kv_tokens: int = 0
) -> tuple[list[str], list[str]]:
    """Compare.

    Args:
        asked: Flag to value; empty for a switch.
        info: The answer of `/server_info`.
        min_kv_tokens: Slots that each attention group must have.

    Returns:
        Lines of what is so, and one sentence for each thing that is not.
    """
    agreed, wrong = [], []
    for flag, wanted in asked.items():
        if flag not in COMPARED:
            continue
        got = info.get(COMPARED[flag])
        if flag in PER_GROUP:
            wanted = str(int(wanted) // int(info.get("attn_dp_size") or 1))
        if flag == "--max-running-requests":
            # The scheduler's own figure, which the cache may have lowered.
            states = info.get("internal_states") or [{}]
            got = states[0].get("effective_max_running_requests_per_dp", got)
        if _same(wanted, got):
            agreed.append(f"{flag} {got}")
        else:
            wrong.append(f"{flag}: asked for {wanted or 'on'}, the server has {got}")

    slots = int(info["max_total_num_tokens"])
    context = int(asked.get("--context-length") or 0)
    if slots < min_kv_tokens:
        wrong.append(
            f"cache: {slots:,} tokens an attention group, expected at least {min_kv_tokens:,}; raise "
            "--mem-fraction-static or lower --chunked-prefill-size"
        )
    elif slots < context:
        wrong.append(
            f"cache: {slots:,} tokens, less than one request of --context-length {context:,}"
        )
    else:
        agreed.append(f"cache: {slots:,} tokens an attention group")

    states = info.get("internal_states") or [{}]
    sizes = states[0].get("decode_cuda_graph_bs") or []
    graph = asked.get("--cuda-graph-max-bs-decode")
    if graph and max(sizes, default=0) < int(graph):
        wrong.append(
            f"--cuda-graph-max-bs-decode: asked for {graph}, the largest captured batch is "
            f"{max(sizes, default='none')}"
        )
    elif sizes:
        agreed.append(f"decode graphs up to batch {max(sizes)}")
    memory = states[0].get("memory_usage")
    if memory:
        agreed.append("memory " + ", ".join(f"{name} {size} GB" for name, size in memory.items()))
    return agreed, wrong


def _same(wanted: str, got: object) -> bool:
    if wanted == "":
        return got is True
    if isinstance(got, (int, float)) and not isinstance(got, bool):
        return float(wanted) == float(got)
    return str(got).lower() == wanted.lower()


def main(arguments: list[str]) -> int:
    """Ask the server and print the comparison."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    url, rest = arguments[0], arguments[1:]
    min_kv_tokens = 0
    if rest[:1] == ["--min-kv-tokens"]:
        if len(rest) < 2 or not rest[1].isdecimal():
            return _refuse("--min-kv-tokens needs a whole number")
        min_kv_tokens, rest = int(rest[1]), rest[2:]
    asked = {word.partition("=")[0]: word.partition("=")[2] for word in rest}
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            info = json.load(answer)
    except (urllib.error.URLError, ValueError, OSError) as error:
        return _refuse(f"{url}/server_info does not answer ({error}); give a server's address")
    agreed, wrong = differences(asked, info, min_kv_tokens)
    print("allocated as asked for:")
    for line in agreed:
        print(f"  {line}")
    for line in wrong:
        print(f"  not so: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _refuse(sentence: str) -> int:
    print(f"check_allocated: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
