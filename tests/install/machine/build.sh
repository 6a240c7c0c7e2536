#!/usr/bin/env bash
# Builds the machine that the package is installed on: a Debian 12 with systemd and AppArmor, and all that the package depends on,
# which is read from its control file; from Debian's own packages, checked by apt against Debian's keys. QEMU loads kernel and
# initramfs itself: there is no boot loader.
#
#   build.sh DIRECTORY      (GUEST_CACHE: where downloaded packages stay; default: guest-cache beside DIRECTORY)
#
# A second run with the same inputs does nothing; remove DIRECTORY to take newer packages.
set -euo pipefail

say() { printf 'install machine: %s\n' "$*"; }
die() { printf 'install machine: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || die "usage: $0 DIRECTORY"
here=$(cd "$(dirname "$0")" && pwd)
control=$here/../../../deploy/deb/control
mkdir -p "$1"
out=$(cd "$1" && pwd)
cache=${GUEST_CACHE:-$(dirname "$out")/guest-cache}

exec 9> "$out/lock"
flock 9
# The first of each alternative, without versions; what every Debian has is there anyway, python3 brings the
# Python of the build, and QEMU brings virtiofsd.
depends=$(awk '/^[^ ]/ {on = /^(Pre-Depends|Depends|Recommends):/} on' "$control" |
  sed 's/^[^ ]*://; s/([^)]*)//g' | tr ',' '\n' | awk 'NF && !/@/ {print $1}' | sort -u)
inputs=$( (cat "$here"/{build.sh,inside.sh}; echo "$depends") | sha256sum | cut -d' ' -f1)
if [ "$(cat "$out/inputs" 2>/dev/null || true)" = "$inputs" ]; then exit 0; fi

[ "$(id -u)" = 0 ] || die "needs root: it installs packages into a directory. Try: sudo make e2e-install"
[ "$(dpkg --print-architecture)" = amd64 ] || die "knows only amd64"
for tool in mmdebstrap unshare mke2fs qemu-img; do
  command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || die "$keys is missing; run: make setup"

mkdir -p "$cache/install/archives/partial"
cache=$(cd "$cache/install" && pwd)
work=$(mktemp -d "$out/work.XXXXXX")
trap 'rm -rf "$work"' EXIT

# shellcheck disable=SC2206
wanted=(
  linux-image-cloud-amd64 initramfs-tools lz4
  systemd-sysv udev apparmor qemu-guest-agent
  $depends
)

# A Debian machine's own mirror of bookworm, if it has one; elsewhere, Debian's.
mirrors=$(apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(REPO_URI)' 2>/dev/null || true)
mirror_of() { sed -n "s/^Packages $1 main //p" <<< "$mirrors" | head -n 1; }
archive=$(mirror_of bookworm)
security=$(mirror_of bookworm-security)
sources="deb ${archive:-http://deb.debian.org/debian} bookworm main
deb ${security:-http://deb.debian.org/debian-security} bookworm-security main"
proxy=$(apt-config dump --format '%v%n' Acquire::http::Proxy)

say "installing ${wanted[*]}"
started=$SECONDS
options=(
  --quiet --mode=root --variant=minbase --format=directory
  --include="$(IFS=,; echo "${wanted[*]}")"
  --keyring=$keys
  --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"'
  ${proxy:+--aptopt="Acquire::http::Proxy \"$proxy\""}
  --dpkgopt=force-unsafe-io
  # Packages stay in the cache.
  --skip=download/empty --skip=essential/unlink
  --setup-hook="mkdir -p \$1/var/cache/apt && cp -a $cache/archives \$1/var/cache/apt/"
  --essential-hook="sh $here/inside.sh before \$1"
  --customize-hook="rm -rf $cache/archives && mv \$1/var/cache/apt/archives $cache/"
  --customize-hook="sh $here/inside.sh after \$1"
)
unshare --mount mmdebstrap "${options[@]}" bookworm "$work/root" - <<< "$sources" > "$work/log" 2>&1 ||
  { tail -n 40 "$work/log" >&2; die "mmdebstrap failed"; }
say "installed in $((SECONDS - started)) s"

cp -L "$work/root/vmlinuz" "$work/vmlinuz"
cp -L "$work/root/initrd.img" "$work/initrd"
truncate -s 8G "$work/disk"
MKE2FS_CONFIG=$work/root/etc/mke2fs.conf mke2fs -q -t ext4 -L root -m 1 -d "$work/root" "$work/disk"
qemu-img convert -q -O qcow2 "$work/disk" "$work/disk.qcow2"
rm -f "$out/inputs"
mv "$work/vmlinuz" "$work/initrd" "$out/"
mv "$work/disk.qcow2" "$out/root.qcow2"
echo "$inputs" > "$out/inputs"
say "$out/root.qcow2: $(($(stat -c %s "$out/root.qcow2") >> 20)) MiB, in $((SECONDS - started)) s"
