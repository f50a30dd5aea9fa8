#!/usr/bin/env bash
# Makes a CA of your own, a certificate for each service and a token for clients: docker/certificates.sh FOLDER [HOST...]
# What a service may be stands in its certificate's names: master, worker or drafter; Prometheus may only look. HOST: names and addresses by
# which clients reach the master, besides this machine's own. Needs openssl.
# Run it again, and everybody has a new certificate by the same CA: services take it without a restart.
set -euo pipefail

folder=${1:?usage: docker/certificates.sh FOLDER [HOST...]}
shift
reader=1000  # who the containers run as
looker=65534 # who Prometheus runs as
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

# issue ROLE HOST...: ROLE/own.key and ROLE/own.pem
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
    owner=$reader
    if [ "$role" = prometheus ]; then owner=$looker; fi
    if [ "$(id -u)" = 0 ]; then
        chown -R "$owner:$owner" "$folder/$role"
    elif [ "$(id -u)" != "$owner" ]; then
        echo "certificates.sh: a container runs as user $owner, who must be able to read $folder/$role" >&2
    fi
done
echo "$folder: ca.pem and token for clients; a folder for each service, and for Prometheus; ca.key for your safe"
