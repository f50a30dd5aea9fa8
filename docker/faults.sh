#!/usr/bin/env bash
# Stops, freezes, disconnects and kills a worker's container while an answer is written. Prints for each of these whether
# the answer is the undisturbed one, and the services' log lines. Then, with `--scale worker=4`, a standby replaces a
# worker that is killed, and `specsot rebalance` assigns a layer range to all four.
# Needs what docker/engine.sh needs. SCRATCH and WHEELS: see docker/try.sh.
set -euo pipefail

# shellcheck source=docker/engine.sh
source "$(dirname "${BASH_SOURCE[0]}")/engine.sh"

trap stop_engine EXIT
start_engine
make_base
fetch_wheels
say "build"
compose build >"$scratch/build.log" 2>&1 || { tail -n 40 "$scratch/build.log"; exit 1; }
say "compose up"
compose up -d --scale worker=2
wait_until_ready
say "trials"
cd "$root"
"$root/.venv/bin/python" deploy/hosts/containers.py nsenter "--net=/run/netns/$space" "$root/.venv/bin/specsot"
