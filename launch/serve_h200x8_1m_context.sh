#!/usr/bin/env bash
# 8 x H200, one node, one request of 1,048,576 tokens.
#
# Tensor parallelism copies the cache to every GPU, and a copy of 1M tokens (54 GB) is more than the
# 40 GB that the weights leave. Two pipeline stages halve it: 39 layers of rows a GPU. The cut lies
# before layer 38, which makes its own selection, so none has to travel between the stages. No
# drafts: SGLang carries them over stages only behind a switch. Spreading the rows (--dcp-size) would
# hold four such requests, and needs Blackwell in SGLang 0.5.23.
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "8 x H200, 1M tokens of context: tensor parallel over 4, two pipeline stages, no drafts, one request of full length."
needs_gpus 8 140
expects_kv_tokens 1048640
server_env SGLANG_PP_LAYER_PARTITION 38,40

flag --model-path zai-org/GLM-5.3
flag --tp-size 4
flag --pp-size 2
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 1048576
flag --max-running-requests 4
flag --cuda-graph-max-bs-decode 4
flag --chunked-prefill-size 4096
flag --mem-fraction-static 0.89
flag --reasoning-parser auto
flag --tool-call-parser auto
flag --enable-metrics

launch "$@"
