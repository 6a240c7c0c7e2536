#!/usr/bin/env bash
# Builds what the passthrough tests' machine boots: a kernel of the distribution with its modules, and an initramfs whose only
# work is to mount the root file system. That is this machine's own, read-only (see ../outer.py), so the packages that are
# tested are those that are installed here, and there is no disk image to make. And the guests inside the machine,
# devices.qcow2 and unplugs.qcow2. Kernel, and the QEMU that emulates the machine, are those of packages.sh; where it fails, the kernel for
# clouds and the QEMU that is installed here do, and what needs more is not tested.
#
#   build.sh DIRECTORY      (GUEST_CACHE: where the small guest's build left its packages; default: guest-cache beside it)
#
# A second run with the same inputs does nothing.
set -euo pipefail

say() { printf 'vfio machine: %s\n' "$*"; }
die() { printf 'vfio machine: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || die "usage: $0 DIRECTORY"
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
cache=${GUEST_CACHE:-$(dirname "$out")/guest-cache}

exec 9> "$out/lock"
flock 9
in_cache() { find "$cache/debs" -name "$1"; }

mkdir -p "$cache/machine"
if "$here/packages.sh" "$cache/machine"; then
  mapfile -t packages < <(find "$cache/machine" -name '*.deb' | sort)
else
  say "goes on with the kernel for clouds and the QEMU that is installed"
  if [ -z "$(in_cache 'linux-image-*.deb')" ]; then
    # The small guest's build brings it, and keeps it.
    GUEST_CACHE=$cache "$here/../../../deploy/guest/build.sh" "$out/guest.qcow2"
    rm -f "$out/guest.qcow2" "$out/guest.qcow2.inputs"
  fi
  # Ubuntu keeps the modules in a package of their own.
  mapfile -t packages < <(in_cache 'linux-image-*.deb'; in_cache 'linux-modules-*.deb')
fi
[ ${#packages[@]} -gt 0 ] || die "no kernel package in $cache; remove $cache and try again"

inputs=$( (cat "$here"/{build.sh,packages.sh,init,boot.S} "$here"/*.[ch]; cat "${packages[@]}" | sha256sum) | sha256sum | cut -d' ' -f1)
if [ "$(cat "$out/inputs" 2>/dev/null || true)" = "$inputs" ]; then exit 0; fi
for tool in busybox cpio depmod modprobe dpkg-deb gcc qemu-img; do
  command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done

work=$(mktemp -d "$out/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
for package in "${packages[@]}"; do dpkg-deb --extract "$package" "$work/packages"; done
kernel=$(find "$work/packages/boot" -name 'vmlinuz-*' | head -n 1)
version=${kernel##*/vmlinuz-}
mkdir -p "$work/modules/lib/modules"
mv "$work"/packages/{,usr/}lib/modules/"$version" "$work/modules/lib/modules/" 2>/dev/null || true
# A machine has no use for these, and they are half of all.
rm -rf "$work/modules/lib/modules/$version"/kernel/{sound,drivers/{gpu,media,iio,staging,net/wireless}}
depmod -b "$work/modules" "$version"

root=$work/root
mkdir -p "$root"/{bin,dev,proc,sys,modules,lower,upper,new}
install -m 0755 "$(command -v busybox)" "$root/bin/busybox"
install -m 0755 "$here/init" "$root/init"
modprobe -d "$work/modules" -S "$version" --show-depends -a virtio_pci virtiofs overlay |
  sed -n 's|^insmod \([^ ]*\).*|\1|p' | awk '!seen[$0]++' |
  while read -r module; do
    name=$(basename "$module")
    # busybox reads none that is compressed.
    case $name in
      *.zst) zstd -q -d < "$module" > "$root/modules/${name%.zst}" ;;
      *.xz) xz -d < "$module" > "$root/modules/${name%.xz}" ;;
      *) install -m 0644 "$module" "$root/modules/" ;;
    esac
    name=${name%.zst}
    echo "${name%.xz}" >> "$root/modules/order"
  done
(cd "$root" && find . -print0 | LC_ALL=C sort -z | cpio --quiet --null -o -H newc -R 0:0 --reproducible) > "$work/initramfs"

as --32 -o "$work/boot.o" "$here/boot.S"
# guest NAME [option of gcc]...: builds the device guest.
guest() {
  local name=$1 made=$work/$1
  shift
  mkdir "$made"
  ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o "$made/disk" "$work/boot.o"
  for source in "$here"/*.c; do
    gcc -m32 -march=i686 -Os -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-stack-protector -fcf-protection=none "$@" \
      -fno-asynchronous-unwind-tables -mgeneral-regs-only -c -o "$made/$(basename "$source" .c).o" "$source"
  done
  ld -m elf_i386 -e start --section-start=.start=0x10000 -Ttext 0x10040 --oformat binary -o "$made/guest" "$made"/*.o
  [ "$(stat -c %s "$made/guest")" -le 32768 ] || die "the device guest is too large for its boot sector"
  cat "$made/guest" >> "$made/disk"
  truncate -s 1M "$made/disk"
  qemu-img convert -q -O qcow2 "$made/disk" "$work/$name.qcow2"
}
guest devices
guest unplugs -DLETS_GO

rm -rf "$out/modules" "$out/qemu" "$out/inputs"
mv "$work/devices.qcow2" "$work/unplugs.qcow2" "$out/"
mv "$work/modules/lib/modules/$version" "$out/modules"
mv "$work/initramfs" "$out/initramfs"
mv "$kernel" "$out/vmlinuz"
if [ -e "$work/packages/usr/bin/qemu-system-x86_64" ]; then mv "$work/packages/usr" "$out/qemu"; fi
echo "$inputs" > "$out/inputs"
say "$out: kernel $version"
