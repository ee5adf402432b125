#!/usr/bin/env bash
# 8 x H200, one node, tens of users: each GPU attends to its own requests, experts by DeepEP, and one
# draft a round, which pays as long as the experts' weights bound a step.
# plan: --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 --context 32k --concurrency 64 --mtp-steps 1
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "8 x H200, balanced: attention by request over 8, DeepEP over 8, EAGLE 1-1-2, up to 64 requests."
needs_gpus 8 140
expects_kv_tokens 290000

flag --model-path zai-org/GLM-5.3
flag --tp-size 8
flag --attn-dp-size 8
flag --ep-size 8
flag --moe-a2a-backend deepep
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 131072
flag --max-running-requests 64
flag --cuda-graph-max-bs-decode 8
flag --chunked-prefill-size 8192
flag --mem-fraction-static 0.876
eagle 1
flag --reasoning-parser auto
flag --tool-call-parser auto
flag --enable-metrics

launch "$@"
