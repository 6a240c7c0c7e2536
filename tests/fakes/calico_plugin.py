"""A CNI plugin that sets a pod up as Calico does: host-length addresses, gateways in no subnet, and a veth whose other
end answers ARP for them. A program: it imports nothing of ours.

    {"type": "calico", "addresses": ["10.90.20.2/32", "fd00:90:20::2/128"]}
"""

import json
import os
import subprocess
import sys
from typing import Any

GATEWAY, GATEWAY_6 = "169.254.1.1", "fe80::ecee:eeff:feee:eeee"


def main() -> None:
    conf = json.load(sys.stdin)
    host = "cali" + os.environ["CNI_CONTAINERID"][:9]
    if os.environ["CNI_COMMAND"] == "ADD":
        add(conf, host)
    elif os.environ["CNI_COMMAND"] == "DEL":
        subprocess.run(["ip", "link", "del", host], capture_output=True, check=False)


def add(conf: dict[str, Any], host: str) -> None:
    name, netns = os.environ["CNI_IFNAME"], os.path.basename(os.environ["CNI_NETNS"])
    ip("link", "add", host, "address", "ee:ee:ee:ee:ee:ee", "type", "veth", "peer", name, "netns", netns)
    ip("link", "set", host, "up")
    ip("address", "add", f"{GATEWAY}/32", "dev", host)  # its link-local address comes with its MAC
    ip("-n", netns, "link", "set", name, "up")
    ip("-n", netns, "route", "add", GATEWAY, "dev", name, "scope", "link")
    for address in conf["addresses"]:
        six = ":" in address
        ip("-n", netns, "address", "add", address, "dev", name, *(["nodad"] if six else []))
        ip("route", "add", address, "dev", host)
        ip("-n", netns, "route", "add", "default", "via", GATEWAY_6 if six else GATEWAY, "dev", name)
    ips = [{"version": "6" if ":" in address else "4", "address": address} for address in conf["addresses"]]
    print(json.dumps({"cniVersion": "0.3.1", "interfaces": [{"name": host}], "ips": ips, "dns": {}}))


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        print(json.dumps({"code": 999, "msg": f"ip {' '.join(words)}: {done.stderr}"}))
        sys.exit(1)


if __name__ == "__main__":
    main()
