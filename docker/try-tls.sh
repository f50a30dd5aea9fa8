#!/usr/bin/env bash
# Runs the services with compose.tls.yaml: asks over gRPC and HTTPS with the certificate and the token, and checks that a
# client without either is refused. Needs and variables: see docker/try.sh.
set -euo pipefail

# shellcheck source=docker/engine.sh
source "$(dirname "${BASH_SOURCE[0]}")/engine.sh"
export COMPOSE_FILE=docker-compose.yml:compose.tls.yaml SPECSOT_CERTIFICATES=$scratch/certificates
tls=(--tls-ca "$SPECSOT_CERTIFICATES/ca.pem")
question=(--master 127.0.0.1:50050 --mode direct --max-new-tokens 40 "Explain Photosynthesis.")

wait_until_ready() {
    say "wait until the ring is ready"
    timeout 180 sh -c "until nsenter --net=/run/netns/$space '$root/.venv/bin/specsot' health 127.0.0.1:50050 \
        --service specsot.v1.Master ${tls[*]}; do sleep 1; done"
    compose ps
}

ask() {
    say "specsot infer, with a token"
    inside "$root/.venv/bin/specsot" infer "${tls[@]}" --token-file "$SPECSOT_CERTIFICATES/token" "${question[@]}"
}

check_refusals() {
    say "without a token, then without TLS: both must be refused"
    if inside "$root/.venv/bin/specsot" infer "${tls[@]}" "${question[@]}"; then return 1; fi
    if inside "$root/.venv/bin/specsot" infer "${question[@]}"; then return 1; fi
}

reflect() {
    say "gRPC reflection through buf, with a token"
    npm install --silent --prefix "$scratch/npm" @bufbuild/buf >/dev/null
    inside "$scratch/npm/node_modules/.bin/buf" curl --protocol grpc --cacert "$SPECSOT_CERTIFICATES/ca.pem" \
        --reflect-header "authorization: Bearer $(cat "$SPECSOT_CERTIFICATES/token")" --list-services https://127.0.0.1:50050
}

ask_over_http() {
    say "list the models over HTTPS"
    inside curl --fail --silent --show-error --cacert "$SPECSOT_CERTIFICATES/ca.pem" \
        -H "Authorization: Bearer $(cat "$SPECSOT_CERTIFICATES/token")" https://127.0.0.1:8000/v1/models
}

trap stop_engine EXIT
start_engine
make_base
fetch_wheels
"$root/docker/certificates.sh" "$SPECSOT_CERTIFICATES"
say "build and start"
compose build
compose up -d
wait_until_ready
ask
check_refusals
reflect
ask_over_http
say "stop: every service must exit by itself"
compose stop
compose ps
