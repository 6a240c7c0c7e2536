"""Pages made from the code: RPCs, errors, a part of the page of annotations. `pages.py` adds them when the site is built."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from virtshim.annotations.hardware import ANNOTATIONS
from virtshim.annotations.parse import _READERS, parse_vm_options
from virtshim.cri.error_codes import GRPC_CODES
from virtshim.cri.images import ImageServicer
from virtshim.cri.server import RuntimeServicer
from virtshim.model import errors
from virtshim.model.errors import ShimError

ROOT = Path(__file__).resolve().parents[2]

# A valid value of each annotation.
EXAMPLES = {
    "kubernetes.io/target-runtime": "virtlet.cloud",
    "virtshim.io/command": "ignore",
    "virtshim.io/exec-ports": "24",
    "virtshim.io/image-config": "ignore",
    "virtshim.io/ports": "22,443,53/udp",
    "virtshim.io/vm-container": "vm",
    **{one.name: one.example for one in ANNOTATIONS},
    "virtshim.io/max-vcpus": "4",
    "virtshim.io/vnc": "true",
    "virtshim.io/forward": "agent",
    "virtshim.io/max-memory": "4Gi",
    "VirtletVCPUCount": "2",
    "VirtletDiskDriver": "scsi",
    "VirtletCPUModel": "host-model",
    "VirtletLibvirtCPUSetting": "mode: host-passthrough",
    "VirtletRootVolumeSize": "10Gi",
    "virtshim.io/network-filter": "off",
    "virtshim.io/profile": "database",
    "virtshim.io/root-disk": "pod",
    "virtshim.io/vm": "by-pod-name",
    "virtshim.io/on-stop": "shutdown",
    "virtshim.io/state-volume": "/state",
    "virtshim.io/restore-from": "node1",
    "virtshim.io/warm-start": "true",
    "virtshim.io/root-disk-on-image-change": "replace",
    "virtshim.io/kubelet-volumes": "shared",
    "virtshim.io/disks": "scratch: {size: 10Gi, mountPath: /var/scratch}",
    "virtshim.io/disk-images": "/srv/data",
    "virtshim.io/memory-volumes": "/var/cache/app",
    "VirtletFilesFromDataSource": "configmap/web-files",
    "VirtletSystemUUID": "53008994-44c0-4017-ad44-9c49758083da",
    "VirtletCloudInitImageType": "nocloud",
    "VirtletCloudInitMetaData": "instance-id: mine",
    "VirtletCloudInitUserData": "packages: [htop]",
    "VirtletCloudInitUserDataOverwrite": "true",
    "VirtletCloudInitUserDataScript": "#!/bin/sh",
    "VirtletSSHKeys": f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 43} me",
    "VirtletForceDHCPNetworkConfig": "true",
    "VirtletCloudInitUserDataSource": "secret/web-data",
    "VirtletSSHKeySource": "configmap/team-keys/mine",
    "virtshim.io/sysprep": "/sysprep",
    "virtshim.io/ignition": '{"ignition": {"version": "3.3.0"}}',
    "virtshim.io/ignition-source": "secret/first-boot",
}

# What an annotation needs beside it.
BESIDE = {
    "virtshim.io/state-volume": {"virtshim.io/vm": "by-pod-name", "virtshim.io/on-stop": "save"},
    "virtshim.io/restore-from": {"virtshim.io/vm": "db"},
}


def pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    return {
        "reference/rpcs.md": rpcs_page(),
        "reference/errors.md": errors_page(),
    }


def annotations_section() -> str:
    """The end of annotations.md: what each annotation sets, and the error for a wrong value, both from the code."""
    rows = [_annotation(name) for name in sorted(_READERS, key=str.lower)]
    return "\n".join(
        [
            "",
            "## Examples and refusals",
            "",
            "Made from `virtshim/annotations` when this site was built: the code has read each example and a wrong value.",
            "",
            "| annotation | example | sets | error for a wrong value |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _annotation(name: str) -> str:
    example = EXAMPLES.get(name)
    wrong = _answer(name, "\N{SNOWMAN} wrong")
    if example is None:
        answers = [_answer(name, value) for value in ("secret/x", "true", "plain", "key")]
        refusal = next((answer for answer in answers if "not supported" in answer), "")
        return f"| `{name}` | - | {'refused' if refusal else '-'} | {_cell(refusal or wrong)} |"
    beside = BESIDE.get(name, {})
    options = dataclasses.asdict(parse_vm_options({**beside, name: example}))
    default = dataclasses.asdict(parse_vm_options(beside))
    sets = ", ".join(f"`{field}` = `{_short(value)}`, else `{_short(default[field])}`"
                     for field, value in options.items() if value != default[field])  # fmt: skip
    shown = example if len(example) < 60 else f"{example[:40]}..."
    return f"| `{name}` | `{shown}` | {_cell(sets or 'nothing here')} | {_cell(wrong or 'any text is taken')} |"


def _answer(name: str, value: str) -> str:
    try:
        parse_vm_options({name: value})
    except ShimError as exc:
        return str(exc).removeprefix(f"annotation {name}: ")
    return ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:50]}..."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


_RPC = re.compile(r"((?:^ *//[^\n]*\n)*)^ *rpc (\w+)\((?:\w+)\)\s*returns \((stream )?\w+\)", re.MULTILINE)


def rpcs_page() -> str:
    """The contract's comments, and whether our servicers have each call."""
    text = (ROOT / "criproto/api.proto").read_text(encoding="utf-8")
    runtime, images = text.split("service ImageService {")[0], text.split("service ImageService {")[1]
    admin = (ROOT / "criproto/admin.proto").read_text(encoding="utf-8")
    parts = [
        "# Calls of CRI",
        "",
        "Made from `criproto/api.proto` and the servicers in `virtshim/cri` when this site was built. *Answered*: virtshim has",
        "the call; to others it answers UNIMPLEMENTED. [lifecycle.md](../dev/lifecycle.md) says step by step what each call",
        "does, and [conformance.md](../dev/conformance.md) has the results of CRI's conformance client.",
        "",
    ]
    for title, contract, servicer in (
        ("RuntimeService", runtime, RuntimeServicer),
        ("ImageService", images, ImageServicer),
    ):
        parts += [f"## {title}", "", "| call | answered | the contract |", "|---|---|---|"]
        for comment, name, stream in _RPC.findall(contract):
            has = any(name in vars(kind) for kind in servicer.__mro__ if kind.__module__.startswith("virtshim."))
            streams = ", a stream" if stream else ""
            parts.append(f"| `{name}` | {'yes' if has else '**UNIMPLEMENTED**'}{streams} | {_cell(_words(comment))} |")
        parts.append("")
    parts += ["## Admin: virtshim's own, on the same socket", "", "| call | what it does |", "|---|---|"]
    parts += [f"| `{name}` | {_cell(_words(comment))} |" for comment, name, _ in _RPC.findall(admin)]
    return "\n".join([*parts, ""])


def _words(comment: str) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())


def errors_page() -> str:
    """All messages of the errors that the code raises; `…` stands for values."""
    kinds = {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ShimError)
    }
    parts = [
        "# Error messages",
        "",
        "Made from the code when this site was built. `…` stands for values. The messages appear in a pod's events, in",
        "`crictl`'s answers and in the log. [Troubleshooting](../how-to/troubleshooting.md) has causes and remedies of the usual",
        "ones, and [failures.md](../dev/failures.md#error-kinds) the kinds.",
        "",
    ]
    found: dict[str, set[tuple[str, str]]] = {}
    for path, kind, message in _raised(set(kinds)):
        found.setdefault(kind, set()).add((message, path))
    for name, messages in sorted(found.items()):
        code = GRPC_CODES[kinds[name].kind].name
        parts += [f"## {name}: {code}", "", "| message | raised in |", "|---|---|"]
        parts += [f"| {_cell(message)} | `{path}` |" for message, path in sorted(messages)]
        parts.append("")
    return "\n".join(parts)


def _raised(kinds: set[str]) -> Iterator[tuple[str, str, str]]:
    for file in sorted((ROOT / "virtshim").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
                message = _template(node.args[0])
                if len(message.replace("…", "").strip()) > 3:
                    yield os.path.relpath(file, ROOT), node.func.id, message


def _template(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_template(value) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _template(left) + _template(right)
        case _:
            return "…"
