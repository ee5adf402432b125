#!/usr/bin/env bash
# 8 x H200, the decode half of a pair; see serve_h200x8_pd_prefill.sh.
# plan: --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 --context 32k --concurrency 64 --mtp-steps 1
# shellcheck source=launch/pd_pair.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/pd_pair.sh"

describe "8 x H200, decode of a pair: attention by request over 8, DeepEP in its low-latency mode, EAGLE 1-1-2."
expects_kv_tokens 290000

flag --disaggregation-mode decode
flag --deepep-mode low_latency
flag --max-running-requests 64
flag --cuda-graph-max-bs-decode 8

launch "$@"
