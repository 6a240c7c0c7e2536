#!/usr/bin/env bash
# Brings what reads our network-config in guests: cloud-init of Debian's oldest, its usual and its newest suite, and the programs
# that apply what it writes (ifupdown; netplan's generator). Unpacked, not installed: on a node they would change its network.
#
#   fetch.sh OUT      (a directory; remove it to take newer packages)
#
# apt checks the packages against Debian's keys, with lists and a cache of its own. A second run with the same inputs does nothing.
set -euo pipefail

say() { printf 'cloud-init: %s\n' "$*"; }
die() { printf 'cloud-init: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || die "usage: $0 OUT"
inputs=$(sha256sum < "$0" | cut -d' ' -f1)
mkdir -p "$(dirname "$1")"
out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
up_to_date() { [ "$(cat "$out/inputs" 2>/dev/null || true)" = "$inputs" ]; }
if up_to_date; then exit 0; fi

keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || die "$keys is missing; run: make setup"
# Of two runs at once the second waits and finds the work done.
exec 9> "$out.lock"
flock 9
if up_to_date; then exit 0; fi
work=$(mktemp -d "$out.XXXXXX")
trap 'rm -rf "$work"' EXIT

# A Debian machine's own mirror, if it has one; elsewhere, Debian's. What that has no more is in the archive.
mirrors=$(apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(REPO_URI)' 2>/dev/null || true)
mirror=$(sed -n 's/^Packages bookworm main //p' <<< "$mirrors" | head -n 1)
mirror=${mirror:-http://deb.debian.org/debian/}

mkdir -p "$work"/out/{oldest,usual,newest,tools} "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
apt_here() {
  apt-get -qq -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::Etc::sourcelist="$work/sources.list" \
    -o Dir::Etc::sourceparts=- -o Acquire::Languages=none -o APT::Update::Error-Mode=any -o APT::Sandbox::User=root "$@"
}

# fetch SUITE DIRECTORY PACKAGE ...
fetch() {
  local suite=$1 into=$2 source
  shift 2
  : > "$work/log"
  for source in "$mirror" http://archive.debian.org/debian/; do
    echo "deb [arch=amd64 signed-by=$keys] $source $suite main" > "$work/sources.list"
    if apt_here update 2>> "$work/log" && (cd "$work/debs" && apt_here download "$@" 2>> "$work/log"); then
      for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$work/out/$into"; done
      rm "$work"/debs/*.deb
      return
    fi
  done
  cat "$work/log" >&2
  die "no $* of $suite"
}

say "fetching cloud-init's renderers"
fetch bullseye oldest cloud-init
fetch bookworm usual cloud-init
fetch sid newest cloud-init
fetch bookworm tools python3-configobj python3-six ifupdown netplan.io libnetplan0

echo "$inputs" > "$work/out/inputs"
rm -rf "$out"
mv "$work/out" "$out"
say "$out: $(du -sh "$out" | cut -f1)"
