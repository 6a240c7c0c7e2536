"""A CNI plugin that sets a pod up as Weave does: a veth on a reflecting bridge of the host, a default route and a
multicast route, and a result without interfaces and routes. A program: it imports nothing of ours.

    {"type": "weave", "bridge": "weave0", "gateway": "10.90.50.1/24", "address": "10.90.50.2/24"}
"""

import json
import os
import subprocess
import sys
from typing import Any


def main() -> None:
    conf = json.load(sys.stdin)
    host = "vethwepl" + os.environ["CNI_CONTAINERID"][:6]
    if os.environ["CNI_COMMAND"] == "ADD":
        add(conf, host)
    elif os.environ["CNI_COMMAND"] == "DEL":
        subprocess.run(["ip", "link", "del", host], capture_output=True, check=False)


def add(conf: dict[str, Any], host: str) -> None:
    name, netns, bridge = os.environ["CNI_IFNAME"], os.path.basename(os.environ["CNI_NETNS"]), conf["bridge"]
    gateway = conf["gateway"].partition("/")[0]
    if not os.path.exists(f"/sys/class/net/{bridge}"):
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", conf["gateway"], "dev", bridge)
        ip("link", "set", bridge, "up")
    ip("link", "add", host, "type", "veth", "peer", name, "netns", netns)
    ip("link", "set", host, "master", bridge, "up")
    ip("link", "set", host, "type", "bridge_slave", "hairpin", "on")
    ip("-n", netns, "address", "add", conf["address"], "dev", name)
    ip("-n", netns, "link", "set", name, "up")
    ip("-n", netns, "route", "add", "default", "via", gateway)
    ip("-n", netns, "route", "add", "224.0.0.0/4", "dev", name)
    ips = [{"version": "4", "address": conf["address"], "gateway": gateway}]
    print(json.dumps({"cniVersion": "0.3.0", "ips": ips, "dns": {}}))


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        print(json.dumps({"code": 999, "msg": f"ip {' '.join(words)}: {done.stderr}"}))
        sys.exit(1)


if __name__ == "__main__":
    main()
