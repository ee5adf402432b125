#!/usr/bin/env bash
# 8 x H200, the prefill half of a pair; serve_h200x8_pd_decode.sh is the other, and
# serve_h200x8_pd_router.sh stands before both.
# plan: --gpu h200 --tp 8 --attn-dp-size 8 --ep 8 --context 64k --concurrency 16 --mtp-steps 1
# shellcheck source=launch/pd_pair.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/pd_pair.sh"

describe "8 x H200, prefill of a pair: attention by request over 8, DeepEP in its normal mode, rows sent on by Mooncake."
expects_kv_tokens 290000

flag --disaggregation-mode prefill
flag --disaggregation-bootstrap-port 8998
flag --deepep-mode normal
flag --max-running-requests 16
flag --chunked-prefill-size 8192

launch "$@"
