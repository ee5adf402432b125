#!/usr/bin/env bash
# 8 x H200, one node, most tokens a second: no drafts, since a full batch leaves no idle arithmetic to
# verify them with; dense MLPs and head are not divided over groups.
# plan: --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 --context 16k --concurrency 128 --mtp-steps 0 --moe-dense-tp-size 1 --enable-dp-lm-head
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "8 x H200, throughput: attention by request over 8, DeepEP over 8, no drafts, up to 128 requests."
needs_gpus 8 140
expects_kv_tokens 280000

flag --model-path zai-org/GLM-5.3
flag --tp-size 8
flag --attn-dp-size 8
flag --ep-size 8
flag --moe-a2a-backend deepep
flag --moe-dense-tp-size 1
flag --enable-dp-lm-head
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 65536
flag --max-running-requests 128
flag --cuda-graph-max-bs-decode 16
flag --chunked-prefill-size 8192
flag --mem-fraction-static 0.874
flag --reasoning-parser auto
flag --tool-call-parser auto
flag --enable-metrics

launch "$@"
