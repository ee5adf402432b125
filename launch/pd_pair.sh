# shellcheck shell=bash
# What the two halves of a prefill/decode pair share. The cache travels as it lies, so both name one
# dtype, one division over ranks, and the same drafts: their rows and the first selection travel too.
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

needs_gpus 8 140

flag --model-path zai-org/GLM-5.3
flag --tp-size 8
flag --attn-dp-size 8
flag --ep-size 8
flag --moe-a2a-backend deepep
flag --kv-cache-dtype fp8_e4m3
flag --dsa-prefill-backend flashmla_sparse_q8
flag --context-length 65536
flag --mem-fraction-static 0.876
eagle 1
flag --disaggregation-transfer-backend mooncake
flag --host 0.0.0.0
flag --port 30000
flag --enable-metrics
