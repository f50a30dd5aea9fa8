#!/usr/bin/env bash
# Compose for real, with a worker that is stopped, frozen, cut off and killed while an answer is written: prints, for
# each, whether the answer is the undisturbed one, and what the services said. Then with `--scale worker=4`: one that
# stands by takes the place of one that is killed, and `specsot rebalance` gives all four a range.
# Needs what docker/engine.sh needs; WHEELS and BASE_READY as in docker/try.sh.
set -euo pipefail

# shellcheck source=docker/engine.sh
source "$(dirname "${BASH_SOURCE[0]}")/engine.sh"

trap stop_engine EXIT
start_engine
make_base
bring_wheels
say "build"
compose build >"$scratch/build.log" 2>&1 || { tail -n 40 "$scratch/build.log"; exit 1; }
say "compose up"
compose up -d --scale worker=2
wait_until_ready
say "trials"
cd "$root"
"$root/.venv/bin/python" deploy/hosts/containers.py nsenter "--net=/run/netns/$space" "$root/.venv/bin/specsot"
