"""Which layout holds your requests, before renting it and on a server that runs.

Needs:  nothing; with --url a running server to compare with.
Run:    python cookbook/08_capacity_planning.py --context 128k --gpu h200
        python cookbook/08_capacity_planning.py --url http://127.0.0.1:30000
Expect: for each layout the tokens that its caches hold and the requests that fit; with --url the
        bytes of the server's cache by the plan and as the server reports them, which must agree.
"""

import contextlib
import io
import json

from recipe import expect, get, parser, run

from sglang_glm.cli.main import main as sglang_glm
from sglang_glm.planning.kv_cache import kv_bytes_per_token_per_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config

LAYOUTS = {
    "TP8": "--tp 8",
    "TP8, experts by GPU": "--tp 8 --ep 8",
    "attention by request, DeepEP": "--tp 8 --attn-dp-size 8 --ep 8",
    "two attention groups, DeepEP": "--tp 8 --attn-dp-size 2 --ep 8",
}


def plan(model: str, words: list[str]) -> dict:
    """One plan as data."""
    text, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(said):
        status = sglang_glm(["plan", model, *words, "--json"])
    expect(status == 0, said.getvalue().strip())
    return json.loads(text.getvalue())


def compare_with(url: str) -> None:
    """Bytes of a cached token, by the plan and by the server."""
    info = get(url, "/server_info").json()
    config = load_config(info["model_path"])
    narrow = info["kv_cache_dtype"] == "fp8_e4m3"
    drafts = bool(info["speculative_algorithm"])
    planned = kv_bytes_per_token_per_gpu(
        config, ParallelLayout(), "fp8_packed" if narrow else "bf16", with_mtp=drafts
    )
    slots = info["max_total_num_tokens"]
    print(
        f"{url}: {slots:,} tokens an attention group, {planned:,} B a token by the plan: "
        f"{slots * planned / 1e9:.3f} GB"
    )
    held = (info["internal_states"][0].get("memory_usage") or {}).get("kvcache")
    if held and info["dtype"] != "float32":
        # SGLang rounds to a hundredth of a GiB.
        error = abs(held * 2**30 - slots * planned)
        print(f"the server reports {held} GiB")
        expect(error < 0.05 * slots * planned + 2**27, f"plan and server differ by {error:,.0f} B")
    expect(slots >= info["page_size"], "the server has no cache")


def main() -> None:
    made = parser(__doc__, url=None)
    made.add_argument("--url", help="a running server to compare with")
    made.add_argument("--model", default="zai-org/GLM-5.3")
    made.add_argument("--gpu", default="h200")
    made.add_argument("--context", default="128k")
    made.add_argument("--concurrency", default="32")
    arguments = made.parse_args()
    load = ["--gpu", arguments.gpu, "--context", arguments.context]
    load += ["--concurrency", arguments.concurrency]

    print(f"{arguments.model}, {arguments.context} tokens a request, 8 x {arguments.gpu}")
    print(f"{'layout':<32}{'tokens cached':>15}{'requests fit':>14}")
    for name, words in LAYOUTS.items():
        capacity = plan(arguments.model, [*words.split(), *load])["capacity"]
        tokens = capacity["tokens_per_attention_group"] * capacity["attention_groups"]
        print(f"{name:<32}{tokens:>15,}{capacity['requests_that_fit']:>14}")
    if arguments.url:
        compare_with(arguments.url)


if __name__ == "__main__":
    run(main)
