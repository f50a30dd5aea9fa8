#!/usr/bin/env bash
# Builds the images and tries them: starts a Docker engine, makes a base image, builds, starts the services with compose,
# asks over gRPC, HTTP and reflection, and stops everything. The engine runs in its own network namespace.
# Needs root, `make install`, and Debian with docker.io, docker-compose, debootstrap, iproute2, iptables; no image
# registry. Variables: SCRATCH=DIR keeps the engine's data, so that a later run reuses the base image and build steps;
# WHEELS=DIR takes wheels from a folder instead of a package index.
set -euo pipefail

# shellcheck source=docker/engine.sh
source "$(dirname "${BASH_SOURCE[0]}")/engine.sh"

wait_until_healthy() {
    say "wait until four containers are healthy"
    timeout 300 sh -c "until [ \$($docker ps --quiet --filter health=healthy | wc -l) = 4 ]; do sleep 1; done"
    compose ps
}

ask() {
    say "specsot infer --master: the answer must have at least two branches"
    inside "$root/.venv/bin/specsot" infer --master 127.0.0.1:50050 --max-new-tokens 200 \
        "How can I sleep better?" 2>&1 | tee "$scratch/answer"
    grep -qE 's; planned: .*; ([2-9]|1[0-9]) branches in ' "$scratch/answer"
}

reflect() {
    say "gRPC reflection and calls through buf"
    npm install --silent --prefix "$scratch/npm" @bufbuild/buf >/dev/null
    local buf=("$scratch/npm/node_modules/.bin/buf" curl --protocol grpc --http2-prior-knowledge)
    inside "${buf[@]}" --list-services http://127.0.0.1:50050
    inside "${buf[@]}" -d '{}' http://127.0.0.1:50050/specsot.v1.Master/GetInfo
    inside "${buf[@]}" -d '{"prompt": "How do I make Banana Pancakes?", "limits": {"maxNewTokens": 40}}' \
        http://127.0.0.1:50050/specsot.v1.Master/Generate | tail -n 3
}

ask_over_http() {
    say "OpenAI's chat completions over HTTP"
    inside curl --fail --silent --show-error http://127.0.0.1:8000/v1/chat/completions \
        --json '{"messages": [{"role": "user", "content": "How do I make Banana Pancakes?"}], "max_tokens": 40}'
}

trap stop_engine EXIT
start_engine
make_base
fetch_wheels
build() {
    local began=$SECONDS
    compose build
    say "$1: $((SECONDS - began)) s"
}

say "build"
build "build 1, from nothing"
printf '\n' >>"$root/app/specsot_app/__init__.py"
build "build 2, after a change of the code" || failed=1
sed -i '$ d' "$root/app/specsot_app/__init__.py"
[ -z "${failed:-}" ]
$docker images --format '{{.Repository}} {{.Size}}' | sort
say "compose up"
compose up -d
wait_until_ready
wait_until_healthy
ask
ask_over_http
reflect
say "stop: every service must exit by itself"
compose stop
compose ps
compose logs --no-color --tail 3
