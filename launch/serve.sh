#!/usr/bin/env bash
# Starts the stock SGLang server and says when it is ready and how to talk to it.
#
#   launch/serve.sh PYTHON MODEL PORT [SERVER ARGUMENTS...]
set -euo pipefail

python=$1 model=$2 port=$3
shift 3

if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  echo "port $port is in use; choose another with PORT=..." >&2
  exit 1
fi

echo "+ $python -m sglang.launch_server --model $model --port $port $*"
"$python" -m sglang.launch_server --model "$model" --port "$port" "$@" &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' INT TERM

while kill -0 "$server" 2>/dev/null; do
  if "$python" -c "import urllib.request as r; r.urlopen(\"http://127.0.0.1:$port/health\", timeout=2)" 2>/dev/null; then
    cat <<READY

Ready. Talk to it from another terminal:

  curl http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "$model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'

Ctrl-C stops it.
READY
    break
  fi
  sleep 1
done
wait "$server"
