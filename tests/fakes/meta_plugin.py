"""A CNI plugin that runs others, as Multus does: it runs each delegate of its configuration in the same namespace,
returns the first result, and keeps a record of each in libcni's form below `cniDir`. A program: it imports nothing of
ours.

    {"type": "meta", "cniDir": "/var/lib/x", "delegates": [{"name": ..., "type": ..., "interface": "net1"?}, ...]}

A delegate's `selection` is what the pod's annotation k8s.v1.cni.cncf.io/networks says of it, which Multus reads from the
API server: `mac` and `ips` reach the delegate as arguments, and as capabilities if it declares them.
"""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def main() -> None:
    conf = json.load(sys.stdin)
    command = os.environ["CNI_COMMAND"]
    delegates = list(enumerate(conf["delegates"]))
    if command == "ADD":
        results = [added(conf, delegate, name_of(at, delegate)) for at, delegate in delegates]
        print(json.dumps(results[0]))
    elif command == "DEL":
        failed = [deleted(conf, delegate, name_of(at, delegate)) for at, delegate in reversed(delegates)]
        if any(failed):
            print(json.dumps({"code": 999, "msg": " / ".join(filter(None, failed))}))
            sys.exit(1)


def name_of(at: int, delegate: Document) -> str:
    return delegate.get("interface") or (f"net{at}" if at else os.environ["CNI_IFNAME"])


def added(conf: Document, delegate: Document, name: str) -> Document:
    done = run(conf, delegate, name)
    if done.returncode:
        print(done.stdout.decode() or json.dumps({"code": 999, "msg": done.stderr.decode()}))
        sys.exit(1)
    result: Document = json.loads(done.stdout)
    path = record_of(conf, delegate, name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {
                    "kind": "cniCacheV1",
                    "containerId": os.environ["CNI_CONTAINERID"],
                    "config": base64.b64encode(json.dumps(delegate).encode()).decode(),
                    "ifName": name,
                    "networkName": delegate["name"],
                    "netns": os.environ["CNI_NETNS"],
                    "result": {**result, **delegate.get("changed", {})},
                }
            )
        )
    return result


def deleted(conf: Document, delegate: Document, name: str) -> str:
    done = run(conf, delegate, name)
    path = record_of(conf, delegate, name)
    if path is not None:
        path.unlink(missing_ok=True)
    return f"{delegate['type']}: {done.stdout.decode()}" if done.returncode else ""


def record_of(conf: Document, delegate: Document, name: str) -> Path | None:
    """The path of the record; None if it keeps none."""
    if "cniDir" not in conf:
        return None
    return Path(conf["cniDir"]) / "results" / f"{delegate['name']}-{os.environ['CNI_CONTAINERID']}-{name}"


def run(conf: Document, delegate: Document, name: str) -> "subprocess.CompletedProcess[bytes]":
    """Runs one plugin of the delegate, which must find its interface unchanged at DEL."""
    folders = os.environ["CNI_PATH"].split(":")
    path = next(path for folder in folders if os.path.exists(path := os.path.join(folder, delegate["type"])))
    selected: Document = delegate.get("selection", {})
    able = {name: value for name, value in selected.items() if delegate.get("capabilities", {}).get(name)}
    given = {"cniVersion": "1.0.0", **delegate, **({"runtimeConfig": able} if able else {})}
    args = [os.environ["CNI_ARGS"]]
    args += [f"MAC={selected['mac']}"] if "mac" in selected else []
    args += [f"IP={','.join(selected['ips'])}"] if "ips" in selected else []
    return subprocess.run(
        [path],
        input=json.dumps(given).encode(),
        capture_output=True,
        env={**os.environ, "CNI_IFNAME": name, "CNI_ARGS": ";".join(args)},
        check=False,
    )


if __name__ == "__main__":
    main()
