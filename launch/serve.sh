#!/usr/bin/env bash
# Any machine: SGLang's own defaults. `make serve` runs this.
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

describe "Any machine: the stock server with its defaults."
flag --model-path checkpoints/tiny-glm-dsa

launch "$@"
