"""Feeds dnsmasq with the names of a cluster's services, because Debian has no DNS server for Kubernetes.

Usage: python -m k8s.cluster.names KUBECONFIG HOSTS_FILE PID_FILE CLUSTER_DOMAIN
A service with a cluster IP has this address, and a headless service the addresses of its endpoints.
"""

import http.client
import json
import os
import signal
import ssl
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INTERVAL_S = 0.5


def main(kubeconfig: Path, hosts_file: Path, pid_file: Path, domain: str) -> None:
    """Writes the file whenever a service or its endpoints have changed, and has dnsmasq read it again."""
    config = json.loads(kubeconfig.read_text())
    server: str = config["clusters"][0]["cluster"]["server"]
    token: str = config["users"][0]["user"]["token"]
    # The API server signed its certificate itself.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(urllib.parse.urlsplit(server).netloc, context=context, timeout=10)
    versions = ("", "")
    while True:
        time.sleep(_INTERVAL_S)
        try:
            services, endpoints = (_list(connection, token, kind) for kind in ("services", "endpoints"))
        except (OSError, http.client.HTTPException) as exc:
            print(f"the API server does not answer: {exc}", flush=True)
            connection.close()
            continue
        lines = "".join(sorted(_lines(services, endpoints, domain)))
        new = (lines, pid_file.read_text() if pid_file.exists() else "")
        if new != versions and new[1]:
            hosts_file.write_text(lines)
            os.kill(int(new[1]), signal.SIGHUP)
            versions = new


def _lines(services: list[dict[str, Any]], endpoints: list[dict[str, Any]], domain: str) -> Iterator[str]:
    addresses = {
        _key(item): [a["ip"] for s in item.get("subsets") or () for a in s.get("addresses", ())] for item in endpoints
    }
    for service in services:
        namespace, name = _key(service)
        own = service["spec"]["clusterIP"]
        for address in addresses.get((namespace, name), ()) if own == "None" else (own,):
            yield f"{address} {name}.{namespace}.svc.{domain}\n"


def _key(item: dict[str, Any]) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _list(connection: http.client.HTTPSConnection, token: str, kind: str) -> list[dict[str, Any]]:
    connection.request("GET", f"/api/v1/{kind}?resourceVersion=0", headers={"Authorization": f"Bearer {token}"})
    items: list[dict[str, Any]] = json.load(connection.getresponse())["items"]
    return items


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
