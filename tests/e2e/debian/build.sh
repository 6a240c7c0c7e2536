#!/usr/bin/env bash
# Builds a Debian 12 image as its users have them, from Debian's own packages: GPT, GRUB for a BIOS and, signed, for UEFI with
# secure boot, an initramfs, systemd, udev, cloud-init with netplan, the QEMU guest agent and OpenSSH. What the product gives to guests is tried with it, beside the small guest of
# deploy/guest, which reads what we wrote with a reader that we wrote.
#
#   build.sh OUT.qcow2      (GUEST_CACHE: where downloaded packages stay; default: guest-cache beside OUT.qcow2)
#
# mmdebstrap installs into a directory, packages are checked by apt against Debian's keys. What it mounts meanwhile is in a mount
# namespace of its own and gone with it; the disk is put together without mounts. A second run with the same inputs does
# nothing; remove OUT.qcow2 to take newer packages.
set -euo pipefail

say() { printf 'debian guest: %s\n' "$*"; }
die() { printf 'debian guest: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || die "usage: $0 OUT.qcow2"
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$(dirname "$1")"
out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cache=${GUEST_CACHE:-$(dirname "$out")/guest-cache}

inputs=$(cd "$here" && cat build.sh inside.sh | sha256sum | cut -d' ' -f1)
up_to_date() { [ -e "$out" ] && [ "$(cat "$out.inputs" 2>/dev/null || true)" = "$inputs" ]; }
if up_to_date; then exit 0; fi

[ "$(id -u)" = 0 ] || die "needs root: it installs packages into a directory. Try: sudo make debian-guest"
[ "$(dpkg --print-architecture)" = amd64 ] || die "knows only amd64"
for tool in mmdebstrap unshare sfdisk mke2fs mkfs.vfat mmd mcopy qemu-img; do
  command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || die "$keys is missing; run: make setup"

mkdir -p "$cache/debian"
cache=$(cd "$cache/debian" && pwd)
# Of two runs at once the second waits and finds the work done.
exec 9> "$cache/lock"
flock 9
if up_to_date; then exit 0; fi
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT

# ---- packages ------------------------------------------------------------------------------------------------------

wanted=(
  linux-image-cloud-amd64 initramfs-tools lz4 grub-pc-bin
  shim-signed grub-efi-amd64-signed
  systemd-sysv udev dbus systemd-resolved libnss-resolve
  cloud-init cloud-guest-utils netplan.io
  qemu-guest-agent openssh-server sudo iproute2 iputils-ping
)
root_id=5a1c2f60-76c4-4f0e-9d0c-64656269616e

# A Debian machine's own mirror of bookworm, if it has one; elsewhere, Debian's.
mirrors=$(apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(REPO_URI)' 2>/dev/null || true)
mirror_of() { sed -n "s/^Packages $1 main //p" <<< "$mirrors" | head -n 1; }
archive=$(mirror_of bookworm)
security=$(mirror_of bookworm-security)
sources="deb ${archive:-http://deb.debian.org/debian} bookworm main
deb ${security:-http://deb.debian.org/debian-security} bookworm-security main"
proxy=$(apt-config dump --format '%v%n' Acquire::http::Proxy)

mkdir -p "$cache/archives/partial"
log=$work/log
say "installing ${wanted[*]}"
started=$SECONDS
options=(
  --quiet --mode=root --variant=minbase --format=directory
  --include="$(IFS=,; echo "${wanted[*]}")"
  --keyring=$keys
  --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"'
  ${proxy:+--aptopt="Acquire::http::Proxy \"$proxy\""}
  --dpkgopt=force-unsafe-io
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*'
  # Packages stay in the cache.
  --skip=download/empty --skip=essential/unlink
  --setup-hook="mkdir -p \$1/var/cache/apt && cp -a $cache/archives \$1/var/cache/apt/"
  --essential-hook="sh $here/inside.sh before \$1"
  --customize-hook="sh $here/inside.sh after \$1 $root_id"
  --customize-hook="rm -rf $cache/archives && mv \$1/var/cache/apt/archives $cache/"
)
unshare --mount mmdebstrap "${options[@]}" bookworm "$work/root" - <<< "$sources" > "$log" 2>&1 ||
  { tail -n 40 "$log" >&2; die "mmdebstrap failed"; }
say "installed in $((SECONDS - started)) s"

# ---- disk ----------------------------------------------------------------------------------------------------------

# As in Debian's own images: GRUB's second part and what UEFI starts in partitions of their own, root as number 1, the last on the
# disk, so that it can grow.
sector=512 grub_at=2048 efi_at=8192 root_at=40960 sectors=$((1024 * 1024 * 1024 / 512))
truncate -s $((sectors * sector)) "$work/disk"
sfdisk --quiet "$work/disk" <<END
label: gpt
disk14 : start=$grub_at, size=$((efi_at - grub_at)), type=21686148-6449-6E6F-744E-656564454649
disk15 : start=$efi_at, size=$((root_at - efi_at)), type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B
disk1 : start=$root_at, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709
END
# The image's own table of features: GRUB and the kernel in it may be older than this machine's mke2fs.
MKE2FS_CONFIG=$work/root/etc/mke2fs.conf mke2fs -q -t ext4 -U $root_id -L root -m 1 -d "$work/root" \
  -E offset=$((root_at * sector)) "$work/disk" $(((sectors - root_at - 2048) * sector / 1024))k

# What grub-install does, which looks for the disk among those of the machine. GRUB's first sector, on the first of the disk, is
# told where the second is (at byte 0x5c), and that one where the rest follows (at byte 0x1f4).
number() { printf '%08x' "$1" | sed 's/\(..\)\(..\)\(..\)\(..\)/\\x\4\\x\3\\x\2\\x\1/' | xargs -0 printf; }
put() { dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
boot=$work/root/boot/grub/i386-pc
head -c 440 "$boot/boot.img" | put "$work/disk" 0
number $grub_at | put "$work/disk" $((0x5c))
number $((grub_at + 1)) | put "$boot/core.img" $((0x1f4))
dd if="$boot/core.img" of="$work/disk" bs=$sector seek=$grub_at conv=notrunc status=none

# What grub-install --removable does: UEFI starts shim, which Microsoft signed, shim the GRUB beside it, which Debian signed. That one
# looks for its configuration in Debian's directory. Without shim's fallback, which would write a boot entry and start anew.
efi=$work/efi
mkfs.vfat -C -F 16 -n EFI "$efi" $(((root_at - efi_at) * sector / 1024)) > /dev/null
mmd -i "$efi" ::EFI ::EFI/BOOT ::EFI/debian
mcopy -i "$efi" "$work/root/usr/lib/shim/shimx64.efi.signed" ::EFI/BOOT/BOOTX64.EFI
mcopy -i "$efi" "$work/root/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed" ::EFI/BOOT/grubx64.efi
mcopy -i "$efi" - ::EFI/debian/grub.cfg <<END
search.fs_uuid $root_id root
set prefix=(\$root)/boot/grub
configfile \$prefix/grub.cfg
END
dd if="$efi" of="$work/disk" bs=$sector seek=$efi_at conv=notrunc status=none

qemu-img convert -q -O qcow2 "$work/disk" "$work/disk.qcow2"
mv "$work/disk.qcow2" "$out"
echo "$inputs" > "$out.inputs"
say "$out: $(($(stat -c %s "$out") >> 20)) MiB, in $((SECONDS - started)) s"
