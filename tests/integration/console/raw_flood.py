"""Simulates a QEMU whose guest floods its console: `raw_flood.py FILE BYTES_A_SECOND` appends until it is killed."""

import os
import sys
import time

LINE = b"the quick brown fox jumps over the lazy dog, and over the lazy dog the quick brown fox jumps\n"
CHUNK = LINE * (256 * 1024 // len(LINE))


def main() -> None:
    path, rate = sys.argv[1], float(sys.argv[2])
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    at = time.monotonic()
    while True:
        os.write(file, CHUNK)
        at = max(at + len(CHUNK) / rate, time.monotonic() - 0.1)
        time.sleep(max(0.0, at - time.monotonic()))


if __name__ == "__main__":
    main()
