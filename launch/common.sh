# shellcheck shell=bash
# What the serve_*.sh scripts share. A script describes a shape with the functions below and ends in
# `launch "$@"`, which composes the command of the stock server, refuses contradictions, starts it,
# waits until it is ready and compares what it really allocated with what was asked for.
#
#   --dry-run          print the composed command and end
#   --python PATH      interpreter that has sglang and sglang-glm (default: .venv, else python3)
#   --ready-timeout S  seconds to wait for the server (default 3600)
#   --help             describe the shape
#   --FLAG [VALUE]     any argument of sglang.launch_server; replaces the shape's own
set -euo pipefail

LAUNCH_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

declare -A FLAGS=()
declare -a FLAG_ORDER=()
declare -A SERVER_ENV=()
declare -a SERVER_ENV_ORDER=()
SHAPE="" NUM_GPUS=0 GPU_GB=0 MIN_KV_TOKENS=0

# describe TEXT: what the shape is for; printed by --help.
describe() { SHAPE=$1; }

# needs_gpus COUNT GB: GPUs of this node, and the memory each must have.
needs_gpus() { NUM_GPUS=$1 GPU_GB=$2; }

# expects_kv_tokens N: slots that each attention group's cache must have after start.
expects_kv_tokens() { MIN_KV_TOKENS=$1; }

# flag NAME [VALUE]: one argument of the server. Later values replace earlier ones.
flag() {
  local name
  name=$(canonical_name "$1")
  [[ -v "FLAGS[$name]" ]] || FLAG_ORDER+=("$name")
  FLAGS[$name]=${2-}
}

# server_env NAME VALUE: a variable of the server's environment, unless the caller has set it.
server_env() {
  [[ -v "SERVER_ENV[$1]" ]] || SERVER_ENV_ORDER+=("$1")
  SERVER_ENV[$1]=${!1-$2}
}

# eagle STEPS: a chain of drafts, as sglang-glm serves them.
eagle() {
  flag --speculative-algorithm EAGLE
  flag --speculative-num-steps "$1"
  flag --speculative-eagle-topk 1
  flag --speculative-num-draft-tokens $(($1 + 1))
}

canonical_name() {
  case $1 in
    --model) echo --model-path ;;
    --tp) echo --tp-size ;;
    --ep) echo --ep-size ;;
    --pp) echo --pp-size ;;
    *) echo "$1" ;;
  esac
}

value_of() { echo "${FLAGS[$1]-$2}"; }

refuse() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# whole NAME DEFAULT [LEAST]: sets REPLY to a flag's value, which must be a whole number.
# (A command substitution could not end the script.)
whole() {
  local least=${3-1}
  REPLY=$(value_of "$1" "$2")
  [[ $REPLY =~ ^(0|[1-9][0-9]{0,8})$ ]] && ((REPLY >= least)) ||
    refuse "$1 is '$REPLY'; give a whole number from $least"
}

refuse_contradictions() {
  local tp dp ep pp nodes steps drafts requests rows capacity graph
  whole --tp-size 1 && tp=$REPLY
  whole --attn-dp-size 1 && dp=$REPLY
  whole --ep-size 1 && ep=$REPLY
  whole --pp-size 1 && pp=$REPLY
  whole --nnodes 1 && nodes=$REPLY
  whole --port 30000
  [[ -n $(value_of --model-path "") ]] || refuse "no model; give --model-path"
  ((NUM_GPUS == 0 || tp * pp == NUM_GPUS * nodes)) ||
    refuse "--tp-size $tp times --pp-size $pp is not $((NUM_GPUS * nodes)), the GPUs of $nodes node(s) of this shape"
  ((tp % dp == 0)) || refuse "--attn-dp-size $dp does not divide --tp-size $tp"
  ((tp % ep == 0)) || refuse "--ep-size $ep does not divide --tp-size $tp"
  if [[ $(value_of --moe-a2a-backend none) == deepep ]]; then
    ((ep == tp)) || refuse "--moe-a2a-backend deepep needs --ep-size $tp, one group of experts a GPU; got $ep"
  fi

  whole --speculative-num-steps 0 0 && steps=$REPLY
  whole --speculative-num-draft-tokens 0 0 && drafts=$REPLY
  if [[ -n $(value_of --speculative-algorithm "") ]]; then
    [[ $(value_of --speculative-eagle-topk 1) == 1 ]] ||
      refuse "--speculative-eagle-topk must be 1: a chain, not a tree"
    ((drafts == steps + 1)) ||
      refuse "--speculative-num-draft-tokens is $drafts; a chain of $steps steps verifies $((steps + 1))"
    ((pp == 1)) || [[ ${SGLANG_ENABLE_PP_SPEC-} == 1 ]] ||
      refuse "SGLang carries drafts over --pp-size $pp stages only with SGLANG_ENABLE_PP_SPEC=1; set it, or drop the drafts"
  elif ((steps + drafts > 0)); then
    refuse "--speculative-num-steps without --speculative-algorithm EAGLE"
  fi

  ((drafts > 0)) || drafts=1
  whole --max-running-requests 0 0 && requests=$REPLY
  if ((requests > 0)); then
    ((requests % dp == 0)) ||
      refuse "--max-running-requests $requests is not a multiple of --attn-dp-size $dp"
    whole --cuda-graph-max-bs-decode "$((requests / dp))" && graph=$REPLY
    ((graph >= requests / dp)) ||
      refuse "--cuda-graph-max-bs-decode $graph is below the $((requests / dp)) requests of an attention group: larger batches would run without a graph"
    if [[ $(value_of --moe-a2a-backend none) == deepep && $(value_of --deepep-mode auto) != normal ]]; then
      # Ranks of an attention group share its rows.
      rows=$(((requests * drafts + tp - 1) / tp))
      capacity=${SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK-128}
      capacity=${SERVER_ENV[SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK]-$capacity}
      ((rows <= capacity)) ||
        refuse "a rank dispatches $rows rows a step, SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK is $capacity"
    fi
  fi
  if [[ $(value_of --dsa-decode-backend "") == flashmla_kv ]]; then
    [[ $(value_of --kv-cache-dtype auto) == fp8_e4m3 ]] ||
      refuse "--dsa-decode-backend flashmla_kv reads packed FP8 rows; add --kv-cache-dtype fp8_e4m3"
  fi
  ((nodes == 1)) || [[ -n $(value_of --dist-init-addr "") ]] ||
    refuse "--nnodes $nodes needs --dist-init-addr HEAD:PORT, the same on every node"
  whole --node-rank 0 0
  ((REPLY < nodes)) || refuse "--node-rank $REPLY of $nodes node(s); the first is 0"
}

check_start() {
  local model
  command -v "$PYTHON" >/dev/null ||
    refuse "$PYTHON is no program; run 'make install', or give --python"
  "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("sglang"))' 2>/dev/null ||
    refuse "$PYTHON has no sglang; run 'make install', or give the --python that has it"
  model=$(value_of --model-path "")
  [[ $model != [./]* || -e $model ]] || refuse "--model-path $model does not exist"
}

check_machine() {
  local port count smallest
  port=$(value_of --port 30000)
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    refuse "port $port is in use; choose another with --port"
  fi
  ((NUM_GPUS > 0)) || return 0
  command -v nvidia-smi >/dev/null || refuse "no nvidia-smi; this shape needs $NUM_GPUS GPUs of $GPU_GB GB"
  count=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | wc -l)
  smallest=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -n 1)
  ((count >= NUM_GPUS && smallest * 1048576 >= GPU_GB * 1000000000)) ||
    refuse "$count GPUs of $((smallest * 1048576 / 1000000000)) GB; this shape needs $NUM_GPUS of $GPU_GB GB"
}

compose() {
  local name
  for name in "${SERVER_ENV_ORDER[@]}"; do COMMAND+=("$name=${SERVER_ENV[$name]}"); done
  ((${#COMMAND[@]} == 0)) || COMMAND=(env "${COMMAND[@]}")
  COMMAND+=("$PYTHON" -m sglang.launch_server)
  for name in "${FLAG_ORDER[@]}"; do
    COMMAND+=("$name")
    [[ -z ${FLAGS[$name]} ]] || COMMAND+=("${FLAGS[$name]}")
  done
}

wait_ready() {
  local url=$1 deadline=$((SECONDS + READY_TIMEOUT))
  while kill -0 "$SERVER" 2>/dev/null; do
    if "$PYTHON" -c "import urllib.request as r; r.urlopen('$url/health', timeout=2)" 2>/dev/null; then
      return 0
    fi
    ((SECONDS < deadline)) || refuse "not ready after $READY_TIMEOUT s; raise --ready-timeout or read the log above"
    sleep 1
  done
  wait "$SERVER" || refuse "the server ended with $? before it was ready; its log is above"
  refuse "the server ended before it was ready; its log is above"
}

stop_server() {
  kill "$SERVER" 2>/dev/null || true
  wait "$SERVER" 2>/dev/null || true
}

# launch ARGS: the script's own arguments.
launch() {
  local dry_run=0 name url
  PYTHON=${PYTHON-} READY_TIMEOUT=3600 COMMAND=()
  while (($#)); do
    case $1 in
      --dry-run) dry_run=1 ;;
      --?*=*)
        # The other way to give a value.
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        continue
        ;;
      --python | --ready-timeout)
        (($# > 1)) || refuse "$1 needs a value"
        if [[ $1 == --python ]]; then PYTHON=$2; else READY_TIMEOUT=$2; fi
        shift
        ;;
      -h | --help)
        echo "$SHAPE"
        sed -n '/^#   --/s/^# //p' "$LAUNCH_DIR/common.sh"
        printf 'examples:\n  launch/%s --dry-run\n' "${0##*/}"
        printf '  launch/%s --model-path /checkpoints/glm --port 31000\n' "${0##*/}"
        exit 0
        ;;
      --*)
        name=$1
        if (($# > 1)) && [[ $2 != --* ]]; then
          flag "$name" "$2" && shift
        else
          flag "$name"
        fi
        ;;
      *) refuse "unexpected argument '$1'; arguments of the server start with --" ;;
    esac
    shift
  done
  if [[ -z $PYTHON ]]; then
    PYTHON="$LAUNCH_DIR/../.venv/bin/python"
    [[ -x $PYTHON ]] || PYTHON=python3
  fi

  [[ $READY_TIMEOUT =~ ^[1-9][0-9]{0,8}$ ]] ||
    refuse "--ready-timeout is '$READY_TIMEOUT'; give whole seconds"
  refuse_contradictions
  compose
  printf '+'
  printf ' %q' "${COMMAND[@]}"
  printf '\n'
  ((dry_run)) && exit 0

  check_machine
  check_start
  url="http://127.0.0.1:$(value_of --port 30000)"
  "${COMMAND[@]}" &
  SERVER=$!
  trap stop_server EXIT INT TERM
  # Followers of a node group have no endpoint of their own.
  if [[ $(value_of --node-rank 0) == 0 ]]; then
    wait_ready "$url"
    local expected=()
    for name in "${FLAG_ORDER[@]}"; do expected+=("$name=${FLAGS[$name]}"); done
    "$PYTHON" "$LAUNCH_DIR/check_allocated.py" "$url" --min-kv-tokens "$MIN_KV_TOKENS" "${expected[@]}" ||
      refuse "the server did not allocate what was asked for; it is stopped"
    cat <<READY

Ready. Talk to it from another terminal:

  curl $url/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "$(value_of --model-path "")", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'

Ctrl-C stops it.
READY
  fi
  wait "$SERVER"
}
