#!/usr/bin/env bash
# 8 x H200, the prefill half of a pair; serve_h200x8_pd_decode.sh is the other, and
# serve_h200x8_pd_router.sh stands before both.
# plan: --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 --context 64k --concurrency 16 --mtp-steps 1
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "8 x H200, prefill of a pair: attention by request over 8, DeepEP in its normal mode, rows sent on by Mooncake."
needs_gpus 8 140
expects_kv_tokens 290000

flag --model-path zai-org/GLM-5.3
flag --tp-size 8
flag --attn-dp-size 8
flag --ep-size 8
flag --moe-a2a-backend deepep
flag --deepep-mode normal
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 65536
flag --max-running-requests 16
flag --chunked-prefill-size 8192
flag --mem-fraction-static 0.876
# The draft's rows and the first selection travel too, so both halves name the same drafts.
eagle 1
flag --disaggregation-mode prefill
flag --disaggregation-transfer-backend mooncake
flag --disaggregation-bootstrap-port 8998
flag --host 0.0.0.0
flag --port 30000
flag --enable-metrics

launch "$@"
