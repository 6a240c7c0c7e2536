#!/usr/bin/env bash
# Makes a Debian 12 / Ubuntu machine ready to build, test and run virtshim: system packages, the images' reader, /dev/kvm's rights, .venv.
# Safe to run again: each step looks first and does only what is missing. Run as root from the project's top directory.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "needs root: it installs packages and prepares the machine. Try: sudo make setup"
command -v apt-get >/dev/null || die "knows only Debian and Ubuntu (apt-get is missing); install the packages listed in $0 by hand"

PACKAGES=(
  # the product: hypervisor, CNI plugins, network tools
  libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86 qemu-utils
  ovmf swtpm swtpm-tools
  containernetworking-plugins iproute2 iptables nftables
  # building libvirt-python and the virtual environment
  python3 python3-venv python3-dev libvirt-dev pkg-config gcc libc6-dev make
  # a guest that UEFI starts, for one test
  systemd-boot-efi
  # the demo guest
  busybox-static syslinux syslinux-common mtools dosfstools cpio xz-utils zstd kmod
  # the Debian guest
  mmdebstrap debian-archive-keyring fdisk e2fsprogs ignition
  # real neighbours for tests and the demo
  docker-registry skopeo openssh-client curl iputils-ping isc-dhcp-client tcpdump systemd dbus genisoimage libfaketime
  # the dashboard's browser, the alert rules' reader, the image's builder
  chromium prometheus buildah
)

install_packages() {
  say "installing $# packages: $*"
  export DEBIAN_FRONTEND=noninteractive
  # A container or a build machine has no init to start services in; nothing here needs them running.
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

missing=()
for package in "${PACKAGES[@]}"; do
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
[ "${#missing[@]}" = 0 ] || install_packages "${missing[@]}"
# The passthrough tests' machine has its files by it. QEMU came with it up to 7.2; since then it is a package of its own.
[ -e /usr/lib/qemu/virtiofsd ] || [ -e /usr/libexec/virtiofsd ] || install_packages virtiofsd
# What tests and benchmark start pods beside, in a directory of its own. Docker's packages have them too, and exclude the distribution's.
if ! command -v containerd >/dev/null || ! command -v runc >/dev/null; then install_packages containerd runc; fi
# They build the dashboard's page. Node.js from elsewhere brings an npm of its own, and excludes the distribution's.
command -v npm >/dev/null || install_packages nodejs npm

# Who reads images, as on a node that is installed.
if ! getent passwd virtshim-parser >/dev/null; then
  say "making the user virtshim-parser"
  systemd-sysusers "$PWD/systemd/virtshim-sysusers.conf"
fi

# /dev/kvm as 0600 root:root makes libvirt probe QEMU anew at every look-up (4 s each); 0660 root:kvm is the distribution's own rule.
if [ -e /dev/kvm ] && [ "$(stat -c '%a %G' /dev/kvm)" != "660 kvm" ]; then
  say "/dev/kvm: setting root:kvm 0660, as the distribution's udev rule would"
  chgrp kvm /dev/kvm && chmod 0660 /dev/kvm
fi

# The virtual environment: anew when the lock changes, the project itself (an editable install) when pyproject.toml does.
# What builds is locked too and there before what is built: pip's own build environments take whatever the index has.
locked=$(sha256sum requirements.lock | cut -d' ' -f1)
if [ "$(cat .venv/.locked 2>/dev/null || true)" != "$locked" ]; then
  say "building .venv"
  rm -rf .venv
  /usr/bin/python3 -m venv .venv
  pip=".venv/bin/pip --quiet --disable-pip-version-check"
  $pip install --require-hashes --only-binary :all: -r requirements-build.lock
  $pip install --require-hashes --no-build-isolation --only-binary :all: --no-binary libvirt-python -r requirements.lock
  echo "$locked" > .venv/.locked
fi
described=$(sha256sum pyproject.toml | cut -d' ' -f1)
if [ "$(cat .venv/.described 2>/dev/null || true)" != "$described" ]; then
  .venv/bin/pip --quiet --disable-pip-version-check install --no-index --no-deps --no-build-isolation --editable .
  echo "$described" > .venv/.described
fi
deploy/dashboard.sh
say "ready"
