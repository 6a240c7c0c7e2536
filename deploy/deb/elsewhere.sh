#!/usr/bin/env bash
# Builds the Debian package for another distribution than this machine's: runs build.sh in a base of that distribution, which
# mmdebstrap makes of its packages.
#
#   elsewhere.sh SUITE DIRECTORY [VERSION]    (SUITE: bookworm, trixie, noble; BASE_CACHE: keeps the bases, default build/deb-bases;
#                                              MIRROR: of the suite's distribution, default its own archive; UBUNTU_KEYRING: the file
#                                              with the keys of Ubuntu's archive)
#   elsewhere.sh SUITE --packages             only the base and the Python packages, for a build without the network
set -euo pipefail

say() { printf 'deb for %s: %s\n' "$suite" "$*"; }
die() { printf 'deb for %s: %s\n' "$suite" "$*" >&2; exit 1; }

suite=${1:-?}
[ $# = 2 ] || [ $# = 3 ] || die "usage: $0 SUITE DIRECTORY [VERSION], or $0 SUITE --packages"
debian=/usr/share/keyrings/debian-archive-keyring.gpg
ubuntu=${UBUNTU_KEYRING:-/usr/share/keyrings/ubuntu-archive-keyring.gpg}
case $suite in
  bookworm | trixie) keys=$debian remedy="run: apt-get install debian-archive-keyring" archive=${MIRROR:-http://deb.debian.org/debian} components=main ;;
  noble)
    keys=$ubuntu archive=${MIRROR:-http://archive.ubuntu.com/ubuntu} components="main universe"
    # Debian 12 has no package with it.
    remedy="copy that file of an Ubuntu machine (package ubuntu-keyring), and name the copy: UBUNTU_KEYRING=FILE"
    ;;
  *) die "is not known; the suites are bookworm (Debian 12), trixie (Debian 13), noble (Ubuntu 24.04)" ;;
esac
[ "$(id -u)" = 0 ] || die "needs root: it installs packages into a directory. Try: sudo make deb FOR=$suite"
for tool in mmdebstrap unshare; do command -v $tool >/dev/null || die "$tool is missing; run: make setup"; done
[ -e "$keys" ] || die "$keys is missing; $remedy"
if [ "$2" != --packages ]; then
  mkdir -p "$2"
  out=$(cd "$2" && pwd)
fi
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
cache=${BASE_CACHE:-$PWD/build/deb-bases}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
work=$(mktemp -d "${TMPDIR:-/var/tmp}/virtshim-deb-$suite.XXXXXX")
trap 'rm -rf "$work"' EXIT

# What build.sh needs.
wanted=python3-venv,python3-dev,libvirt-dev,pkg-config,gcc,libc6-dev,binutils,gzip,xz-utils,ca-certificates
exec 9> "$cache/lock-$suite"
flock 9
base=$cache/$suite-$( (echo "$wanted $archive"; cat "$here/elsewhere.sh") | sha256sum | cut -c1-16).tar
if [ ! -e "$base" ]; then
  say "making a base of $archive"
  options=(
    --quiet --mode=root --variant=minbase --format=tar --include="$wanted" --components="${components// /,}" --keyring="$keys"
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io
  )
  proxy=$(apt-config dump --format '%v%n' Acquire::http::Proxy)
  [ -z "$proxy" ] || options+=(--aptopt="Acquire::http::Proxy \"$proxy\"")
  unshare --mount mmdebstrap "${options[@]}" "$suite" "$work/base.tar" "$archive" > "$work/log" 2>&1 ||
    { tail -n 20 "$work/log" >&2; die "its packages cannot be had from $archive; name another mirror: MIRROR=http://..."; }
  rm -f "$cache/$suite"-*.tar
  mv "$work/base.tar" "$base"
fi

say "building in the base"
root=$work/root
mkdir -p "$root" "$cache/packages-$suite"
tar -xf "$base" -C "$root"
mkdir -p "$root/src" "$root/out" "$root/cache"
if [ "$(git rev-parse --is-inside-work-tree 2>/dev/null || true)" = true ]; then
  git ls-files -z --cached --others --exclude-standard -- . ':!tests' ':!build' | tar -c --null -T - --ignore-failed-read | tar -x -C "$root/src"
else
  tar -c --exclude=./tests --exclude=./build --exclude=./dist --exclude=./.venv . | tar -x -C "$root/src"
fi
if [ -d build/dashboard/dist ]; then
  mkdir -p "$root/src/build/dashboard"
  cp -r build/dashboard/dist "$root/src/build/dashboard/"
fi
# The package index is reached as from this machine.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  [ ! -e "$file" ] || cp -L "$file" "$root$file"
done
words=(--packages)
[ "$2" = --packages ] || words=(/out ${3:+"$3"})
unshare --mount bash -euo pipefail -s "$root" "$cache/packages-$suite" "${out:-$work}" "${words[@]}" <<'END'
root=$1
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$2" "$root/cache"
mount --bind "$3" "$root/out"
DEB_CACHE=/cache TMPDIR=/tmp exec chroot "$root" /src/deploy/deb/build.sh "${@:4}"
END
