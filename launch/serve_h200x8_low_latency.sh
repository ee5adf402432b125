#!/usr/bin/env bash
# 8 x H200, one node, few users: every GPU works on every request, six rows a verify.
# plan: --gpu h200 --tp 8 --context 64k --concurrency 8 --mtp-steps 5
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "8 x H200, lowest latency: tensor parallel over 8, EAGLE 5-1-6, up to 8 requests."
needs_gpus 8 140
# One attention group: each GPU holds the whole cache.
expects_kv_tokens 600000

flag --model-path zai-org/GLM-5.3
flag --tp-size 8
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 131072
flag --max-running-requests 8
flag --cuda-graph-max-bs-decode 8
flag --chunked-prefill-size 8192
flag --mem-fraction-static 0.891
eagle 5
flag --reasoning-parser auto
flag --tool-call-parser auto
flag --enable-metrics

launch "$@"
