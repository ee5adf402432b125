#!/usr/bin/env bash
# No GPU: FP32 arithmetic, drafts, and every parser. The trained tiny checkpoint unless another is named.
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "CPU: FP32, EAGLE 3-1-4, the trained tiny checkpoint."

flag --model-path checkpoints/tiny-glm-dsa
flag --dtype float32
flag --context-length 16384
flag --max-running-requests 8
flag --chunked-prefill-size 2048
flag --max-total-tokens 32768
eagle 3
flag --reasoning-parser auto
flag --tool-call-parser auto
flag --enable-metrics

launch "$@"
