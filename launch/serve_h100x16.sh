#!/usr/bin/env bash
# 2 nodes of 8 x H100 (80 GB). Run it on both:
#
#   launch/serve_h100x16.sh --node-rank 0 --dist-init-addr HEAD:20000
#   launch/serve_h100x16.sh --node-rank 1 --dist-init-addr HEAD:20000
#
# One attention group a node, so that its all-reduces stay on NVLink; only dispatch and combine cross
# the network.
# plan: --gpu h100 --tp 16 --attn-dp-size 2 --ep 16 --context 64k --concurrency 8 --mtp-steps 3 --chunked-prefill-size 4096
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "2 x 8 x H100: one attention group of 8 a node, DeepEP over 16, EAGLE 3-1-4, up to 8 requests."
needs_gpus 8 79
expects_kv_tokens 250000

flag --model-path zai-org/GLM-5.3
flag --nnodes 2
flag --node-rank 0
flag --tp-size 16
flag --attn-dp-size 2
flag --ep-size 16
flag --moe-a2a-backend deepep
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --dsa-decode-backend flashmla_kv
flag --context-length 131072
flag --max-running-requests 8
flag --cuda-graph-max-bs-decode 4
flag --chunked-prefill-size 4096
flag --mem-fraction-static 0.83
eagle 3
flag --reasoning-parser auto
flag --tool-call-parser auto
flag --enable-metrics

launch "$@"
