"""Certificates as gRPC wants them, and who a peer is by its own.

Refuses to know files (specsot.rpc.tls reads them) and what peers want.

Who may do what in the ring stands in the certificate's DNS names: `master`, `worker`, `drafter`. Addresses
come and go with containers, so members check a peer's role, not its host; clients check the host, as ever.
"""

from __future__ import annotations

from typing import Any, Literal

import grpc

from specsot.errors import Refused
from specsot.rpc.fresh import WatchedFiles
from specsot.rpc.tls import Tls, read_pems

Role = Literal["master", "worker", "drafter"]


def server_credentials(tls: Tls) -> grpc.ServerCredentials | None:
    """None: no TLS. Changed files hold from the next connection on. Raises InvalidRequest."""
    if tls.cert is None:
        return None
    fresh = WatchedFiles(tls.paths, lambda: _configuration(tls))
    return grpc.dynamic_ssl_server_credentials(fresh.value(), fresh.value, tls.ca is not None)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """None: no TLS. Read anew for every channel. Raises InvalidRequest."""
    if tls.ca is None:
        return None
    pems = read_pems(tls)
    key, cert = pems.pair or (None, None)
    return grpc.ssl_channel_credentials(pems.ca, key, cert)


def names_of(context: Any) -> frozenset[str] | None:
    """The names in the peer's certificate; None where the door asks for no certificates."""
    known = context.auth_context()
    if "x509_pem_cert" not in known:
        return None
    return frozenset(name.decode(errors="replace") for name in known.get("peer_dns", ()))


def check_role(names: frozenset[str] | None, who: str, *roles: Role) -> None:
    """Raises Refused when a peer's certificate, which has these names, is for none of the roles."""
    if names is not None and names.isdisjoint(roles):
        shown = ", ".join(sorted(names)) or "nobody"
        raise Refused(f"{who} shows a certificate for {shown}; {' or '.join(roles)} is needed")


def _configuration(tls: Tls) -> Any:
    pems = read_pems(tls)
    return grpc.ssl_server_certificate_configuration([pems.pair] if pems.pair else [], pems.ca)
