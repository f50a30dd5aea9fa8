#!/usr/bin/env bash
# Creates a certificate authority (CA), a certificate for each service, and a token for clients:
#   docker/certificates.sh FOLDER [HOST...]
# HOST: further names and addresses under which clients reach the master, besides those of this machine.
# A name in each certificate says which role its owner has: master, worker, drafter or prometheus, which may only read
# metrics. A second run makes new certificates by the same CA; running services load them without a restart.
# Needs openssl.
set -euo pipefail

folder=${1:?usage: docker/certificates.sh FOLDER [HOST...]}
shift
service_user=1000     # User id of the containers.
prometheus_user=65534 # User id of the Prometheus container.
umask 077
mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

make_key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

make_authority() {
    make_key "$folder/ca.key"
    openssl req -x509 -new -key "$folder/ca.key" -out "$folder/ca.pem" -days 3650 -config /dev/stdin <<-END
		[req]
		distinguished_name = name
		x509_extensions = authority
		prompt = no
		[name]
		CN = SpecSoT fleet
		[authority]
		basicConstraints = critical, CA:TRUE, pathlen:0
		keyUsage = critical, keyCertSign, cRLSign
		subjectKeyIdentifier = hash
	END
}

# issue ROLE HOST...: write ROLE/own.key and ROLE/own.pem
issue() {
    local role=$1 names=DNS:$1 host
    shift
    for host in localhost 127.0.0.1 ::1 "$@"; do
        if [[ $host == *:* || $host =~ ^[0-9.]+$ ]]; then names+=,IP:$host; else names+=,DNS:$host; fi
    done
    make_key "$scratch/key"
    printf '%s\n' "subjectAltName = $names" "basicConstraints = critical, CA:FALSE" \
        "keyUsage = critical, digitalSignature" "extendedKeyUsage = serverAuth, clientAuth" \
        "subjectKeyIdentifier = hash" "authorityKeyIdentifier = keyid" >"$scratch/extensions"
    openssl req -new -key "$scratch/key" -subj "/CN=$role" -out "$scratch/request" -config <(
        printf '[req]\ndistinguished_name = name\n[name]\n'
    )
    openssl x509 -req -in "$scratch/request" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -days 365 \
        -set_serial "0x$(openssl rand -hex 16)" -extfile "$scratch/extensions" -out "$scratch/pem" 2>/dev/null
    mkdir -p "$folder/$role"
    cp "$folder/ca.pem" "$folder/$role/ca.pem"
    mv "$scratch/key" "$folder/$role/own.key"
    mv "$scratch/pem" "$folder/$role/own.pem"
}

[ -f "$folder/ca.key" ] || make_authority
issue master "$@"
issue worker
issue drafter
issue prometheus
[ -f "$folder/token" ] || openssl rand -hex 32 >"$folder/token"
[ -f "$folder/master/tokens" ] || cp "$folder/token" "$folder/master/tokens"

for role in master worker drafter prometheus; do
    owner=$service_user
    if [ "$role" = prometheus ]; then owner=$prometheus_user; fi
    if [ "$(id -u)" = 0 ]; then
        chown -R "$owner:$owner" "$folder/$role"
    elif [ "$(id -u)" != "$owner" ]; then
        echo "certificates.sh: a container runs as user $owner, who must be able to read $folder/$role" >&2
    fi
done
echo "$folder: ca.pem and token are for clients, one folder for each service; keep ca.key secret, services do not need it"
