"""The servers of the ordinary suite. It starts each once; the suite may start ten in all."""

from pathlib import Path

from sglang_glm.cli.plan import make_plan
from sglang_glm.planning.flags import launch_flags
from tests.gpu.serving import experts
from tests.support.checkpoints import checkpoint
from tests.support.mtp_checkpoints import aligned
from tests.support.mtp_traffic import ARGS, ENV, INDEX_TOPK, draft_args
from tests.support.plans import make_parser
from tests.support.server import ServerSpec

_SMALL_POOL = ("--max-total-tokens", "20480")
_CHUNKED = ("--chunked-prefill-size", "128")
#: FP32 arithmetic and caches.
TRUTH = ("--dtype", "float32", *_CHUNKED, *_SMALL_POOL)

#: The answers can carry what the indexer selected.
SELECTIONS = "--enable-return-indexer-topk"

#: Where a server that counts the experts hit leaves its records.
EXPERT_RECORDS = Path(__file__).parents[2] / ".cache" / "tests" / "expert_records"
_RECORDER = tuple(experts.environment(EXPERT_RECORDS).items())

#: FP32 everywhere; selection bites from the ninth position on.
TRUTH_8 = ServerSpec(
    checkpoint("--mtp", "--index-topk", "8"), (*TRUTH, SELECTIONS, *experts.FLAGS), _RECORDER
)

#: FP32 everywhere, with all that a user of the HTTP endpoints turns on.
TRUTH_64 = ServerSpec(
    checkpoint("--mtp", "--index-topk", "64"),
    (*TRUTH, "--enable-metrics", "--reasoning-parser", "auto", "--tool-call-parser", "auto"),
)

#: BF16 as a user gets it without flags, but index keys as they are.
BF16_8 = ServerSpec(
    TRUTH_8.model, (*_CHUNKED, *_SMALL_POOL), env=(("SGLANG_GLM_INDEX_KEY_DTYPE", "bfloat16"),)
)

#: FP32 arithmetic over 656-byte rows and 8,448-byte index pages.
FP8_CACHE_8 = ServerSpec(TRUTH_8.model, (*TRUTH, "--kv-cache-dtype", "fp8_e4m3"))

#: A checkpoint of FP8 blocks, whose shared experts and MTP layer stay in BF16.
FP8_WEIGHTS_8 = ServerSpec(
    checkpoint(
        "--mtp",
        "--index-topk",
        "8",
        "--fp8",
        "--fp8-exclude",
        "shared_experts",
        "--fp8-exclude",
        "nextn",
    ),
    TRUTH,
)

#: Drafts of which many are right, five a round.
DRAFTS_16 = ServerSpec(
    aligned(INDEX_TOPK), (*ARGS, *draft_args(5), *experts.FLAGS), (*ENV, *_RECORDER)
)


def _planned(model: str) -> ServerSpec:
    words = f"{model} --gpu h200 --tp 1 --context 2k --concurrency 4 --chunked-prefill-size 256"
    plan = make_plan(make_parser().parse_args(words.split()))
    return ServerSpec(model, (*launch_flags(plan, model), "--max-total-tokens", "8448"))


#: What `sglang-glm plan` recommends for one H200, but for the size of the cache.
PLANNED = _planned(TRUTH_8.model)
