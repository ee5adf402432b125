#!/usr/bin/env bash
# Any machine: SGLang's own defaults, and the parsers that the chat template asks for. `make serve` runs this.
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "Any machine: the stock server with its defaults, parsers by the chat template."
flag --model-path checkpoints/tiny-glm-dsa
flag --reasoning-parser auto
flag --tool-call-parser auto

launch "$@"
