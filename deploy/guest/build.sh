#!/usr/bin/env bash
# Builds a small bootable VM image from the distribution's packages: SeaBIOS, syslinux, the distribution's kernel for clouds, and
# an initramfs with busybox, the QEMU guest agent and an SSH server. ./init is the guest's first program.
#
#   build.sh OUT.qcow2      (GUEST_CACHE: keeps downloaded packages; default: guest-cache beside OUT.qcow2; remove that directory
#                            for newer packages)
#
# It mounts nothing, and only changes OUT's directory and the cache. A second run with the same inputs does nothing.
set -euo pipefail

say() { printf 'guest: %s\n' "$*"; }
die() { printf 'guest: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || die "usage: $0 OUT.qcow2"
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$1")"
out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cache=${GUEST_CACHE:-$(dirname "$out")/guest-cache}

inputs=$(cd "$here" && cat build.sh init udhcpc shutdown inittab devices.c nocloud.c yaml.c yaml.h | sha256sum | cut -d' ' -f1)
up_to_date() { [ -e "$out" ] && [ "$(cat "$out.inputs" 2>/dev/null || true)" = "$inputs" ]; }
if up_to_date; then exit 0; fi

[ "$(dpkg --print-architecture)" = amd64 ] || die "knows only amd64"
for tool in gcc busybox syslinux mcopy mkfs.vfat cpio qemu-img modprobe depmod objcopy apt-get; do
  command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done
busybox_binary=$(command -v busybox)
if ldd "$busybox_binary" >/dev/null 2>&1; then die "$busybox_binary is not static; run: make setup (package busybox-static)"; fi

mkdir -p "$cache/debs"
cache=$(cd "$cache" && pwd)
# If two run at once, the second waits and finds the work done.
exec 9> "$cache/lock"
flock 9
if up_to_date; then exit 0; fi
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT

# ---- packages ------------------------------------------------------------------------------------------------------

depends_of() { apt-cache depends --important "$1" 2>/dev/null | sed -n 's/^ *Depends: *//p'; }
known() { apt-cache show --no-all-versions "$1" >/dev/null 2>&1; }

# The kernel package's name contains a version, which the meta package of Debian or Ubuntu depends on.
find_kernel() {
  local meta
  for meta in linux-image-cloud-amd64 linux-image-virtual linux-image-generic linux-image-amd64; do
    if known "$meta" && kernel=$(depends_of "$meta" | grep -m 1 -E '^linux-image-[0-9]'); then return; fi
  done
  return 1
}

fetch() {
  local wanted library
  if [ -e "$cache/debs/complete" ]; then return; fi
  find_kernel || { apt-get update -qq && find_kernel; } || die "no kernel package in the package lists (apt-get update)"
  wanted=("$kernel" qemu-guest-agent)
  if known dropbear-bin; then wanted+=(dropbear-bin); else say "no package dropbear-bin: the guest will have no SSH server"; fi
  if known "linux-modules-${kernel#linux-image-}"; then wanted+=("linux-modules-${kernel#linux-image-}"); fi
  # The C library is the machine's. Other libraries are downloaded too if they are not installed.
  for library in $(depends_of qemu-guest-agent; depends_of dropbear-bin; depends_of libtomcrypt1); do
    case " ${wanted[*]} " in *" $library "*) continue ;; esac
    case $library in lib*) dpkg-query -W "$library" >/dev/null 2>&1 || wanted+=("$library") ;; esac
  done
  say "downloading ${wanted[*]}"
  rm -f "$cache"/debs/*.deb
  (cd "$cache/debs" && apt-get download -qq -o APT::Sandbox::User=root "${wanted[@]}")
  touch "$cache/debs/complete"
}

fetch
mkdir "$work/packages"
for package in "$cache"/debs/*.deb; do dpkg-deb --extract "$package" "$work/packages"; done
packages=$work/packages
kernel_image=$(find "$packages/boot" -name 'vmlinuz-*' | head -n 1)
[ -n "$kernel_image" ] || die "no kernel in $cache/debs; remove that directory and try again"
version=${kernel_image##*/vmlinuz-}

# ---- root file system ----------------------------------------------------------------------------------------------

root=$work/root
mkdir -p "$root"/{bin,sbin,lib64,lib/modules,usr/bin,usr/sbin,dev,proc,sys,run,tmp,mnt,root,home,srv/www,var/log,var/lib}
mkdir -p "$root"/etc/{acpi/PWRF,dropbear,virtshim}
chmod 1777 "$root/tmp"
chmod 0700 "$root/root"
ln -s ../run "$root/var/run"

install -m 0755 "$busybox_binary" "$root/bin/busybox"
for applet in $("$busybox_binary" --list-full); do
  mkdir -p "$root/$(dirname "$applet")"
  [ -e "$root/$applet" ] || ln -s /bin/busybox "$root/$applet"
done

gcc -Os -Wall -Wextra -s -o "$root/sbin/devices" "$here/devices.c"
gcc -Os -Wall -Wextra -s -o "$root/sbin/nocloud" "$here/nocloud.c" "$here/yaml.c"

install -m 0755 "$(find "$packages/usr" -name qemu-ga -type f | head -n 1)" "$root/usr/sbin/qemu-ga"
if [ -e "$packages/usr/sbin/dropbear" ]; then install -m 0755 "$packages/usr/sbin/dropbear" "$root/usr/sbin/dropbear"; fi
# Gives a terminal to a command that was started without one.
install -m 0755 "$(command -v script)" "$root/usr/bin/script"

# All shared libraries, also those of downloaded packages, are directly in /lib64.
library_path=$(find "$packages" -name '*.so*' -printf '%h\n' | grep -v /modules/ | sort -u | paste -sd:)
for binary in "$root"/sbin/{devices,nocloud} "$root"/usr/sbin/{qemu-ga,dropbear} "$root/usr/bin/script"; do
  [ -e "$binary" ] || continue
  needed=$(LD_LIBRARY_PATH=$library_path ldd "$binary")
  case $needed in *'not found'*) die "a library is missing for ${binary##*/}: $needed" ;; esac
  for library in $(grep -o '/[^ ]*\.so[^ ]*' <<< "$needed"); do
    [ -e "$root/lib64/${library##*/}" ] || install -m 0755 "$library" "$root/lib64/${library##*/}"
  done
done
ln -s ../lib64 "$root/lib/x86_64-linux-gnu"
# If this plug-in is not part of the C library, it looks account names up in /etc/passwd.
for plugin in /lib/x86_64-linux-gnu/libnss_files.so.2 /usr/lib/x86_64-linux-gnu/libnss_files.so.2; do
  [ ! -e "$plugin" ] || install -m 0755 "$plugin" "$root/lib64/"
done

install -m 0755 "$here/init" "$root/init"
install -m 0755 "$here/udhcpc" "$root/etc/udhcpc"
printf '#!/bin/sh\nexec /init again\n' > "$root/etc/virtshim/new-instance"
chmod 0755 "$root/etc/virtshim/new-instance"
install -m 0644 "$here/inittab" "$root/etc/inittab"
for name in shutdown poweroff reboot halt; do
  rm -f "$root/sbin/$name"
  install -m 0755 "$here/shutdown" "$root/sbin/$name"
done
ln -s /sbin/poweroff "$root/etc/acpi/PWRF/00000080"
echo 'root:*:0:0:root:/root:/bin/sh' > "$root/etc/passwd"
echo 'root:x:0:' > "$root/etc/group"
echo '/bin/sh' > "$root/etc/shells"
echo "export PS1='\\u@\\h:\\w\\\$ '" > "$root/etc/profile"
echo 'passwd: files' > "$root/etc/nsswitch.conf"
printf '127.0.0.1 localhost\n::1 localhost\n' > "$root/etc/hosts"
printf 'ID=virtshim-guest\nNAME="virtshim guest"\nPRETTY_NAME="virtshim guest"\nVERSION_ID=1\n' > "$root/etc/os-release"
: > "$root/etc/resolv.conf"
: > "$root/etc/fstab"

# ---- kernel modules ------------------------------------------------------------------------------------------------

# Loaded at boot, in this order. Disks come last but one, because loading a module waits until earlier ones have probed their
# devices. ./devices.c chooses the lists.
declare -A at_boot=(
  [virtio]="virtio_pci isofs virtio_console virtio_net virtio_blk virtio-rng virtio_balloon evdev button pvpanic-mmio pvpanic-pci"
  [scsi]="sd_mod sr_mod virtio_scsi"
  [ata]="sd_mod sr_mod ahci ata_piix"
)
# Loaded on demand.
on_demand=(ext4 loop vfat nls_ascii nls_cp437 nls_utf8 nls_iso8859-1 fuse virtiofs 9p 9pnet_virtio nvme e1000 e1000e squashfs overlay
  vmw_vsock_virtio_transport virtio_mem 8021q af_packet qemu_fw_cfg)

tree=$packages/lib/modules/$version
[ -d "$tree" ] || tree=$packages/usr/lib/modules/$version
find "$tree" -name '*.ko.zst' -exec zstd -q -d --rm {} +
find "$tree" -name '*.ko.xz' -exec xz -d {} +
mkdir -p "$work/all/lib/modules" "$root/lib/modules/$version"
ln -s "$tree" "$work/all/lib/modules/$version"
depmod -b "$work/all" "$version"

# Paths, below the tree, of a module and its dependencies; nothing if it is built in or does not exist.
paths_of() {
  { modprobe -d "$work/all" -S "$version" --show-depends "$1" 2>/dev/null || true; } |
    sed -n "s|^insmod .*/lib/modules/$version/\([^ ]*\).*|\1|p"
}

for module in ${at_boot[*]} "${on_demand[@]}"; do
  for path in $(paths_of "$module"); do
    [ ! -e "$root/lib/modules/$version/$path" ] || continue
    mkdir -p "$root/lib/modules/$version/$(dirname "$path")"
    # Without signature, debug and type information, so that each boot has less to read and check.
    objcopy --strip-debug --remove-section=.BTF "$tree/$path" "$root/lib/modules/$version/$path"
  done
done
cp "$tree"/modules.{order,builtin,builtin.modinfo} "$root/lib/modules/$version/" 2>/dev/null || true
depmod -b "$root" "$version"
rm -f "$root/lib/modules/$version"/modules.{order,builtin,builtin.modinfo,symbols,symbols.bin,devname,softdep,*.bin}
for list in "${!at_boot[@]}"; do
  for module in ${at_boot[$list]}; do paths_of "$module"; done | awk '!seen[$0]++' | sed "s|^|/lib/modules/$version/|" > "$root/lib/modules/$list"
done

# ---- disk ----------------------------------------------------------------------------------------------------------

(cd "$root" && find . -print0 | LC_ALL=C sort -z | cpio --quiet --null -o -H newc -R 0:0 --reproducible) > "$work/initramfs"
cat > "$work/syslinux.cfg" <<'CONFIG'
DEFAULT linux
PROMPT 0
NOESCAPE 1
LABEL linux
  KERNEL /vmlinuz
  INITRD /initramfs
  APPEND console=ttyS0,115200 loglevel=6 mitigations=off nokaslr audit=0 tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on net.ifnames=0
CONFIG

kilobytes=$(( ($(stat -c %s "$kernel_image") + $(stat -c %s "$work/initramfs")) / 1024 + 3072 ))
mkfs.vfat -C -F 16 -n VIRTSHIM -i 76697274 "$work/disk" $(( (kilobytes + 1023) / 1024 * 1024 )) >/dev/null
syslinux --install "$work/disk"
mcopy -i "$work/disk" "$kernel_image" ::vmlinuz
mcopy -i "$work/disk" "$work/initramfs" ::initramfs
mcopy -i "$work/disk" "$work/syslinux.cfg" ::syslinux.cfg
# Not compressed: that would save 11 MB, but a boot under emulation would take some 0.6 s longer.
qemu-img convert -q -O qcow2 "$work/disk" "$work/disk.qcow2"
mv "$work/disk.qcow2" "$out"
echo "$inputs" > "$out.inputs"
say "$out: $(( $(stat -c %s "$out") / 1024 )) KiB, kernel $version, initramfs $(( $(stat -c %s "$work/initramfs") / 1024 )) KiB"
