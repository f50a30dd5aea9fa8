#!/usr/bin/env bash
# Tries compose.tls.yaml for real: certificates, a token, every way in with them and one without. As docker/try.sh.
set -euo pipefail

# shellcheck source=docker/engine.sh
source "$(dirname "${BASH_SOURCE[0]}")/engine.sh"
export COMPOSE_FILE=docker-compose.yml:compose.tls.yaml SPECSOT_CERTIFICATES=$scratch/certificates
papers=(--tls-ca "$SPECSOT_CERTIFICATES/ca.pem")
asked=(--master 127.0.0.1:50050 --mode direct --max-new-tokens 40 "Explain Photosynthesis.")

wait_until_ready() {
    say "waiting for the ring"
    timeout 180 sh -c "until nsenter --net=/run/netns/$space '$root/.venv/bin/specsot' health 127.0.0.1:50050 \
        --service specsot.v1.Master ${papers[*]}; do sleep 1; done"
    compose ps
}

ask() {
    say "specsot infer, with a token"
    inside "$root/.venv/bin/specsot" infer "${papers[@]}" --token-file "$SPECSOT_CERTIFICATES/token" "${asked[@]}"
}

be_refused() {
    say "the same without a token, then without TLS: refused"
    if inside "$root/.venv/bin/specsot" infer "${papers[@]}" "${asked[@]}"; then return 1; fi
    if inside "$root/.venv/bin/specsot" infer "${asked[@]}"; then return 1; fi
}

reflect() {
    say "reflection by a stranger's client, with a token"
    npm install --silent --prefix "$scratch/npm" @bufbuild/buf >/dev/null
    inside "$scratch/npm/node_modules/.bin/buf" curl --protocol grpc --cacert "$SPECSOT_CERTIFICATES/ca.pem" \
        --reflect-header "authorization: Bearer $(cat "$SPECSOT_CERTIFICATES/token")" --list-services https://127.0.0.1:50050
}

ask_over_http() {
    say "OpenAI's models over HTTPS"
    inside curl --fail --silent --show-error --cacert "$SPECSOT_CERTIFICATES/ca.pem" \
        -H "Authorization: Bearer $(cat "$SPECSOT_CERTIFICATES/token")" https://127.0.0.1:8000/v1/models
}

trap stop_engine EXIT
start_engine
make_base
bring_wheels
"$root/docker/certificates.sh" "$SPECSOT_CERTIFICATES"
say "build and up"
compose build
compose up -d
wait_until_ready
ask
be_refused
reflect
ask_over_http
say "stop: every service ends by itself"
compose stop
compose ps
