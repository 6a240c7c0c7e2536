#!/usr/bin/env bash
# Builds the null guest (null.S) as a bootable disk image of 1 MiB.
#
#   build-null.sh OUT.qcow2
set -euo pipefail

[ $# = 1 ] || { echo "usage: $0 OUT.qcow2" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
out=$1
mkdir -p "$(dirname "$out")"
if [ "$out" -nt "$here/null.S" ] && [ "$out" -nt "$here/build-null.sh" ]; then exit 0; fi

work=$(mktemp -d "$(dirname "$out")/null.XXXXXX")
trap 'rm -rf "$work"' EXIT
as --32 -o "$work/null.o" "$here/null.S"
ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o "$work/disk" "$work/null.o"
truncate -s 1M "$work/disk"
qemu-img convert -q -O qcow2 "$work/disk" "$work/disk.qcow2"
mv "$work/disk.qcow2" "$out"
