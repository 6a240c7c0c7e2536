"""A TCP connection inside a guest, made with the tools of its image. Pure."""

from __future__ import annotations

from typing import Final

from virtshim.domain.guest.command import GuestCommand

_ENV: Final = (("PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),)

# Argument: the port. Joins input and output with the connection; the end of the input is the end of what is sent. The first that
# is there is taken, the exact and quick ones first; bash alone cannot pass the end of the input on.
DIAL_SCRIPT: Final = r"""
port=$1
for nc in nc "busybox nc"; do
  case $($nc --help 2>&1) in *BusyBox*"Usage: nc"*) exec $nc 127.0.0.1 "$port" ;; esac
done
if command -v python3 >/dev/null; then
  exec python3 -c '
import os, socket, sys, threading
try:
    pod = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
except OSError as exc:
    sys.exit(exc.strerror)
def send():
    try:
        for piece in iter(lambda: os.read(0, 65536), b""):
            pod.sendall(piece)
        pod.shutdown(socket.SHUT_WR)
    except OSError:
        pass
threading.Thread(target=send, daemon=True).start()
for piece in iter(lambda: pod.recv(65536), b""):
    while piece:
        piece = piece[os.write(1, piece):]
os._exit(0)' "$port"
fi
if command -v bash >/dev/null; then
  exec bash -c 'exec 4<&0 3<>"/dev/tcp/127.0.0.1/$0" || exit 1
cat <&4 >&3 &
cat <&3
kill $! 2>/dev/null
exit 0' "$port"
fi
echo "the guest has none of busybox with nc, python3 and bash; install one in the image, or remove virtshim.io/forward" >&2
exit 127
"""


def dial_command(port: int) -> GuestCommand:
    """Exit code 0 when the connection has ended; another one, and a reason on stderr, if there was none."""
    return GuestCommand(("/bin/sh", "-c", DIAL_SCRIPT, "virtshim-dial", str(port)), _ENV)
