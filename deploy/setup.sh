#!/usr/bin/env bash
# Prepares a Debian 12 / Ubuntu machine to build, test and run virtshim: system packages, the images' reader, /dev/kvm's mode, .venv.
# Safe to repeat: each step only does what is missing. Run as root from the project's top directory.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "needs root: it installs packages and prepares the machine. Try: sudo make setup"
command -v apt-get >/dev/null || die "knows only Debian and Ubuntu (apt-get is missing); install the packages listed in $0 by hand"

PACKAGES=(
  # the product: hypervisor, CNI plugins, network tools
  libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86 qemu-utils
  ovmf swtpm swtpm-tools passt
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
  # the dashboard's browser, the alert rules' reader, the image's builder, the package's critic
  chromium prometheus buildah lintian
)

install_packages() {
  say "installing $# packages: $*"
  export DEBIAN_FRONTEND=noninteractive
  # Containers and build machines have no init that could start services, and nothing here needs them.
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Ubuntu has Chromium as a snap only. Without it the tests of the dashboard's page are skipped.
not_here=$(. /etc/os-release && [ "$ID" = ubuntu ] && echo chromium || true)
missing=()
for package in "${PACKAGES[@]}"; do
  [ "$package" != "$not_here" ] || continue
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
[ "${#missing[@]}" = 0 ] || install_packages "${missing[@]}"
# The passthrough tests' machine shares files by it. It was part of QEMU up to 7.2, and is a separate package now.
[ -e /usr/lib/qemu/virtiofsd ] || [ -e /usr/libexec/virtiofsd ] || install_packages virtiofsd
# Other runtimes for tests and the benchmark. Docker's packages contain them too, and conflict with the distribution's.
if ! command -v containerd >/dev/null || ! command -v runc >/dev/null; then install_packages containerd runc; fi
# These build the dashboard's page. Node.js from elsewhere has its own npm, and conflicts with the distribution's.
command -v npm >/dev/null || install_packages nodejs npm

# The user that reads images, as on an installed node.
if ! getent passwd virtshim-parser >/dev/null; then
  say "making the user virtshim-parser"
  systemd-sysusers "$PWD/systemd/virtshim-sysusers.conf"
fi

# With /dev/kvm as 0600 root:root, libvirt probes QEMU at every look-up (4 s each). The distribution's rule is 0660 root:kvm.
if [ -e /dev/kvm ] && [ "$(stat -c '%a %G' /dev/kvm)" != "660 kvm" ]; then
  say "/dev/kvm: setting root:kvm 0660, as the distribution's udev rule would"
  chgrp kvm /dev/kvm && chmod 0660 /dev/kvm
fi

# The virtual environment is rebuilt when the lock changes, and the project (an editable install) when pyproject.toml does. Build
# tools are locked too and installed first, because pip's own build environments would take any version from the index.
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
