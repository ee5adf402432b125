#!/usr/bin/env bash
# The router before a prefill and a decode server (pip install sglang-router). It needs no GPU.
#
#   launch/serve_h200x8_pd_router.sh PREFILL_URL DECODE_URL [--dry-run] [ROUTER ARGUMENTS...]
set -euo pipefail

usage="usage: ${0##*/} http://PREFILL:30000 http://DECODE:30000 [--dry-run] [router arguments]"
if [[ ${1-} == --help ]]; then
  echo "$usage"
  exit 0
fi
(($# >= 2)) || { echo "$usage" >&2; exit 2; }
prefill=$1 decode=$2
shift 2
dry_run=0
if [[ ${1-} == --dry-run ]]; then
  dry_run=1
  shift
fi
[[ $prefill != "$decode" ]] || { echo "${0##*/}: prefill and decode are both $prefill" >&2; exit 2; }

command=("${PYTHON:-python3}" -m sglang_router.launch_router --pd-disaggregation
  --prefill "$prefill" 8998 --decode "$decode" --host 0.0.0.0 --port 8000 "$@")
printf '+'
printf ' %q' "${command[@]}"
printf '\n'
((dry_run)) && exit 0
"${command[0]}" -c 'import sglang_router' 2>/dev/null ||
  { echo "${0##*/}: sglang_router is not installed; pip install sglang-router" >&2; exit 2; }
for url in "$prefill" "$decode"; do
  until "${command[0]}" -c "import urllib.request as r; r.urlopen('$url/health', timeout=2)" 2>/dev/null; do
    echo "waiting for $url" >&2
    sleep 5
  done
done
exec "${command[@]}"
