"""Draws docs/programs.svg, the programs of a node and their connections: `python deploy/docs_site/diagram.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).resolve().parents[2] / "docs/programs.svg"

_WIDTH, _HEIGHT = 170, 46
# Name -> its centre, and its user.
BOXES: Final = {
    "kubelet, crictl": (110, 60, ""),
    "virtshim proxy": (110, 170, "root; optional"),
    "containerd, CRI-O": (110, 280, "root; optional"),
    "virtshim": (380, 170, "root"),
    "libvirt": (650, 170, "root"),
    "tapmanager": (380, 60, "root"),
    "virtshim-shares": (380, 280, "root"),
    "vmwrapper": (650, 60, "the VM's own user"),
    "QEMU: the guest": (920, 60, "the VM's own user"),
    "virtiofsd": (920, 280, "one a VM with volumes"),
    "virtshim agent": (110, 390, "root; optional"),
    "API server": (380, 390, ""),
}
ARROWS: Final = (
    ("kubelet, crictl", "virtshim proxy", "CRI"),
    ("virtshim proxy", "containerd, CRI-O", "CRI"),
    ("virtshim proxy", "virtshim", "CRI"),
    ("virtshim", "tapmanager", "seqpacket"),
    ("virtshim", "virtshim-shares", "seqpacket"),
    ("virtshim", "libvirt", "API"),
    ("libvirt", "vmwrapper", "exec"),
    ("vmwrapper", "tapmanager", "fetch: taps"),
    ("vmwrapper", "QEMU: the guest", "exec"),
    ("virtshim-shares", "virtiofsd", "exec"),
    ("QEMU: the guest", "virtiofsd", "vhost-user"),
    ("virtshim agent", "virtshim", "admin socket"),
    ("virtshim agent", "API server", "TLS"),
)


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1030 440" role="img" aria-label="The programs of a node">',
        "<style>text{font:14px sans-serif;fill:#24292f;text-anchor:middle}.as,.says{font-size:11px;fill:#57606a}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>',
        '<rect width="1030" height="440" fill="#ffffff"/>',
    ]
    parts += [_arrow(*arrow) for arrow in ARROWS]
    for name, (x, y, user) in BOXES.items():
        left, top = x - _WIDTH // 2, y - _HEIGHT // 2
        parts.append(
            f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#e6f4f1" stroke="#00796b"/>'
        )
        parts.append(f'<text x="{x}" y="{y - 2 if user else y + 5}">{escape(name)}</text>')
        parts.append(f'<text x="{x}" y="{y + 15}" class="as">{escape(user)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _arrow(source: str, target: str, says: str) -> str:
    (x1, y1, _), (x2, y2, _) = BOXES[source], BOXES[target]
    if x1 == x2:
        down = 1 if y2 > y1 else -1
        y1, y2 = y1 + down * _HEIGHT // 2, y2 - down * _HEIGHT // 2
        place = (x1 + 34, (y1 + y2) // 2 + 4)
    else:
        right = 1 if x2 > x1 else -1
        x1, x2 = x1 + right * _WIDTH // 2, x2 - right * _WIDTH // 2
        place = ((x1 + x2) // 2, (y1 + y2) // 2 - 6)
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#57606a" marker-end="url(#head)"/>'
    return f'{line}<text x="{place[0]}" y="{place[1]}" class="says">{escape(says)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
