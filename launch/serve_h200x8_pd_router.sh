#!/usr/bin/env bash
# The router before a prefill and a decode server (pip install sglang-router). It needs no GPU.
#
#   launch/serve_h200x8_pd_router.sh PREFILL_URL DECODE_URL [--dry-run] [ROUTER ARGUMENTS...]
set -euo pipefail

usage="usage: ${0##*/} http://PREFILL:30000 http://DECODE:30000 [--dry-run] [router arguments]"
refuse() {
  echo "${0##*/}: $*" >&2
  exit 2
}

dry_run=0
declare -a words=()
for word in "$@"; do
  case $word in
    -h | --help)
      echo "$usage"
      exit 0
      ;;
    --dry-run) dry_run=1 ;;
    *) words+=("$word") ;;
  esac
done
((${#words[@]} >= 2)) || refuse "needs two addresses; $usage"
prefill=${words[0]} decode=${words[1]}
for url in "$prefill" "$decode"; do
  [[ $url == http://* || $url == https://* ]] || refuse "'$url' is no address; $usage"
done
[[ $prefill != "$decode" ]] || refuse "prefill and decode are both $prefill"

command=("${PYTHON:-python3}" -m sglang_router.launch_router --pd-disaggregation
  --prefill "$prefill" 8998 --decode "$decode" --host 0.0.0.0 --port 8000 "${words[@]:2}")
printf '+'
printf ' %q' "${command[@]}"
printf '\n'
((dry_run)) && exit 0
"${command[0]}" -c 'import sglang_router' 2>/dev/null ||
  refuse "sglang_router is not installed; pip install '.[disaggregation]'"
for url in "$prefill" "$decode"; do
  until "${command[0]}" -c "import urllib.request as r; r.urlopen('$url/health', timeout=2)" 2>/dev/null; do
    echo "waiting for $url" >&2
    sleep 5
  done
done
exec "${command[@]}"
