"""Types on a VM's serial socket, as attach does."""

from __future__ import annotations

import secrets
import socket

_LIMIT = 60.0


class SerialConsole:
    def __init__(self, path: str) -> None:
        self.path = path

    def type(self, command: str) -> None:
        """Sends one line and stays until the command has run or the VM has ended: the UART holds 16 bytes, and QEMU
        drops the rest when the client leaves. The end marker is a word that the echo of the line does not contain."""
        word = secrets.token_hex(4)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_LIMIT)
            sock.connect(self.path)
            self._await_prompt(sock)
            sock.sendall(f"{command}; echo end''{word}\n".encode())
            seen = b""
            while f"end{word}".encode() not in seen:
                piece = sock.recv(4096)
                if not piece:  # the VM has ended: the line was a poweroff
                    return
                seen += piece

    @staticmethod
    def _await_prompt(sock: socket.socket) -> None:
        """Waits for the prompt: a shell that is just starting discards input before its first prompt."""
        seen = b""
        sock.settimeout(1.0)
        for _ in range(int(_LIMIT)):
            sock.sendall(b"\n")
            try:
                while b"# " not in seen:
                    seen += sock.recv(4096)
            except TimeoutError:
                continue
            break
        sock.settimeout(_LIMIT)
