"""A CNI plugin that runs a chain of others, for meta plugins that take one plugin per network: each gets the previous
result, and DEL runs in reverse order. A program: it imports nothing of ours.

    {"type": "chain", "plugins": [{"type": "bridge", ...}, {"type": "sbr"}], "name": ..., "ipam": of the first}
"""

import json
import os
import subprocess
import sys
from typing import Any

Document = dict[str, Any]


def main() -> None:
    conf = json.load(sys.stdin)
    if os.environ["CNI_COMMAND"] == "ADD":
        result: Document = {}
        for plugin in conf["plugins"]:
            result = json.loads(run(conf, {**plugin, **({"prevResult": result} if result else {})}))
        print(json.dumps(result))
    elif os.environ["CNI_COMMAND"] == "DEL":
        for plugin in reversed(conf["plugins"]):
            run(conf, plugin)


def run(conf: Document, plugin: Document) -> bytes:
    """Runs one plugin; returns its output."""
    folders = os.environ["CNI_PATH"].split(":")
    path = next(path for folder in folders if os.path.exists(path := os.path.join(folder, plugin["type"])))
    given = {"cniVersion": conf["cniVersion"], "name": conf["name"], **plugin}
    done = subprocess.run([path], input=json.dumps(given).encode(), capture_output=True, check=False)
    if done.returncode:
        sys.stdout.buffer.write(done.stdout)
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
