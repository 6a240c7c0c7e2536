#!/usr/bin/env bash
# Upgrades a Debian 12 that has the package to Debian 13, as docs/install.md says: first the distribution, then the package. apt and dpkg
# are real and take Debian's packages from its archive. All of it is in a directory: no systemd, no service and no VM runs there.
#
#   release_upgrade.sh      (MIRROR, SECURITY: Debian's archives, default this machine's or Debian's own)
set -euo pipefail

say() { printf 'release upgrade: %s\n' "$*"; }
die() { printf 'release upgrade: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "needs root: it installs packages into a directory. Try: sudo make e2e-release-upgrade"
for tool in mmdebstrap unshare; do command -v $tool >/dev/null || die "$tool is missing; run: make setup"; done
cd "$(dirname "$0")/../.."
work=$(mktemp -d /var/tmp/virtshim-release-upgrade.XXXXXX)
trap 'rm -rf "$work"' EXIT
root=$work/root

# A Debian machine's own mirrors, if it has some.
mirrors=$(apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(REPO_URI)' 2>/dev/null || true)
mirror_of() { sed -n "s/^Packages $1 main //p" <<< "$mirrors" | head -n 1; }
archive=${MIRROR:-$(mirror_of bookworm)}
security=${SECURITY:-$(mirror_of bookworm-security)}
sources_of() {
  echo "deb ${archive:-http://deb.debian.org/debian} $1 main"
  echo "deb ${security:-http://deb.debian.org/debian-security} $1-security main"
}

say "the packages for Debian 12 and 13"
here=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
for suite in bookworm trixie; do
  if [ "$suite" = "$here" ]; then
    deploy/deb/build.sh "$work/$suite" 7.8.9
  else
    deploy/deb/elsewhere.sh "$suite" "$work/$suite" 7.8.9
  fi
done

say "a Debian 12"
proxy=$(apt-config dump --format '%v%n' Acquire::http::Proxy)
options=(
  --quiet --mode=root --variant=minbase --format=directory --keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io
  ${proxy:+--aptopt="Acquire::http::Proxy \"$proxy\""}
)
unshare --mount mmdebstrap "${options[@]}" bookworm "$root" - <<< "$(sources_of bookworm)" > "$work/log" 2>&1 ||
  { tail -n 20 "$work/log" >&2; die "its packages cannot be had; name another mirror: MIRROR=http://... SECURITY=http://..."; }
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
for file in /etc/resolv.conf /etc/hosts; do cp -L "$file" "$root$file"; done
sources_of trixie > "$root/var/tmp/trixie.list"
cp "$work"/bookworm/*.deb "$root/var/tmp/twelve.deb"
cp "$work"/trixie/*.deb "$root/var/tmp/thirteen.deb"

cat > "$root/var/tmp/steps" <<'END'
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
step() { echo "release upgrade: $*"; }
# is FOUND WANTED
is() { [ "$1" = "$2" ] || { printf 'expected: %s\nfound: %s\n' "$2" "$1" >&2; exit 1; }; }
get() {
  apt-get -y -q -o Dpkg::Options::=--force-confold "$@" > /var/tmp/log 2>&1 || { tail -n 60 /var/tmp/log >&2; exit 1; }
}
version() { dpkg-query -W -f '${db:Status-Status} ${Version}' virtshim; }
# What a node keeps: its id in the database, settings, disks of VMs.
kept() {
  /usr/lib/virtshim/bin/python3 -I -c '
from virtshim.store.records import SqliteRecords
records = SqliteRecords("/var/lib/virtshim/state.db")
print(records.node_id())
records.close()'
  find /etc/virtshim/config.toml.d /var/lib/virtshim/vms -type f -exec sha256sum {} + | sort
  dpkg-statoverride --list /var/lib/libvirt/qemu
  grep '^unix_sock_ro_perms' /etc/libvirt/libvirtd.conf
}

step "its package is installed and set up"
get update
get install /var/tmp/twelve.deb
is "$(version)" "installed 7.8.9~deb12"
printf '[vm]\nmax_vcpus = 7\n' > /etc/virtshim/config.toml.d/own.toml
mkdir -p /var/lib/virtshim/vms/default/kept
echo disk > /var/lib/virtshim/vms/default/kept/root.qcow2
# Exit code 1: without systemd something is left to do.
virtshim setup > /var/tmp/log 2>&1 || [ $? = 1 ] || { cat /var/tmp/log >&2; exit 1; }
before=$(kept)

step "Debian 12 becomes Debian 13"
cp /var/tmp/trixie.list /etc/apt/sources.list
rm -f /etc/apt/sources.list.d/*
get update
get full-upgrade
is "$(. /etc/os-release && echo "$VERSION_ID")" 13
is "$(python3 -c 'import sys; print(*sys.version_info[:2])')" "3 13"

step "the package for Debian 12 still works there, also after an autoremove"
get autoremove
is "$(version)" "installed 7.8.9~deb12"
is "$(virtshim version)" 7.8.9
is "$(VIRTSHIM_EMULATOR=/bin/echo /usr/libexec/virtshim/vmwrapper -version)" -version
is "$(kept)" "$before"

step "the package for Debian 13 replaces it, and brings virtiofsd"
get -o APT::Install-Recommends=true install /var/tmp/thirteen.deb
is "$(version)" "installed 7.8.9~deb13"
is "$(ls /usr/libexec/virtiofsd)" /usr/libexec/virtiofsd
is "$(ls /usr/lib/virtshim/lib)" python3.13
is "$(dpkg --verify virtshim)" ""
is "$(kept)" "$before"
get autoremove
is "$(find /usr/bin -name python3.11)" ""
is "$(virtshim version)" 7.8.9
virtshim check --json > /var/tmp/check || [ $? = 1 ]
is "$(python3 -c '
import json
levels = {one["subject"]: one["level"] for one in json.load(open("/var/tmp/check"))}
print(*(levels[subject] for subject in ("QEMU", "qemu-img", "QEMU user", "vmwrapper", "volumes")))')" "ok ok ok ok ok"
END
unshare --mount bash -euo pipefail -s "$root" <<'END'
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs run "$1/run"
exec chroot "$1" bash -euo pipefail /var/tmp/steps < /dev/null
END
say "all of it works"
