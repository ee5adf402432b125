#!/usr/bin/env bash
# One H200 and no weights: the shapes of GLM-5.3 with 7 layers (3 dense, 4 MoE) and random FP8 values.
# For kernels and for measuring; its text is noise. MODEL is a folder with the model's config.json and
# tokenizer.
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "One H200, 7 layers with random FP8 weights, EAGLE 5-1-6: shapes and speed, not text."
needs_gpus 1 140
expects_kv_tokens 1000000

flag --model-path zai-org/GLM-5.3
flag --load-format dummy
# indexer_types has one entry a layer: full at 0, 1, 2 and 6, as in the whole model.
flag --json-model-override-args '{"num_hidden_layers": 7, "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full"]}'
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 131072
flag --max-running-requests 32
flag --cuda-graph-max-bs-decode 32
flag --chunked-prefill-size 8192
flag --mem-fraction-static 0.85
eagle 5
flag --enable-metrics

launch "$@"
