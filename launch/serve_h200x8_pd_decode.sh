#!/usr/bin/env bash
# 8 x H200, the decode half of a pair; see serve_h200x8_pd_prefill.sh.
# plan: --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 --context 32k --concurrency 64 --mtp-steps 1
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "8 x H200, decode of a pair: attention by request over 8, DeepEP in its low-latency mode, EAGLE 1-1-2."
needs_gpus 8 140
expects_kv_tokens 290000

flag --model-path zai-org/GLM-5.3
flag --tp-size 8
flag --attn-dp-size 8
flag --ep-size 8
flag --moe-a2a-backend deepep
flag --deepep-mode low_latency
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 65536
flag --max-running-requests 64
flag --cuda-graph-max-bs-decode 8
flag --mem-fraction-static 0.876
eagle 1
flag --disaggregation-mode decode
flag --disaggregation-transfer-backend mooncake
flag --host 0.0.0.0
flag --port 30000
flag --enable-metrics

launch "$@"
