#!/usr/bin/env bash
# Brings what the machine needs beyond the packages that are installed here: a kernel with all drivers, and a QEMU that has
# SR-IOV network cards (igb: 8.0 or newer). Debian 12's are too old or too small and its backports have both; elsewhere the
# distribution's own do. Nothing is installed: packages are checked by apt against the distribution's keys, and kept.
#
#   packages.sh DIRECTORY   (remove DIRECTORY to take newer packages)
#
# Fails, with what is missing, where they cannot be had: the machine then has the kernel for clouds, and no such card.
set -euo pipefail

die() { printf 'vfio machine: %s\n' "$*" >&2; exit 1; }

mkdir -p "$1"
cd "$1"
[ ! -e complete ] || exit 0
rm -f ./*.deb
[ "$(dpkg --print-architecture)" = amd64 ] || die "knows only amd64"
. /etc/os-release

# Package lists and sources of our own: those of this machine stay as they are.
mkdir -p apt/lists/partial apt/archives/partial
cat > apt/conf <<END
#clear APT::Update;
Dir::Etc::SourceList "$PWD/apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$PWD/apt/lists";
Dir::Cache "$PWD/apt";
APT::Sandbox::User "root";
END
own() { "$1" -c "$PWD/apt/conf" "${@:2}"; }
any() { "$@"; }
# "any" asks the machine's own package lists.
depends_of() { "$1" apt-cache depends --important "$2" 2>/dev/null | sed -n 's/^ *Depends: *//p'; }
known() { "$1" apt-cache show --no-all-versions "$2" >/dev/null 2>&1; }

from=any
if [ "$ID" = debian ] && known any linux-image-amd64; then
  archive=$(apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(REPO_URI)' |
    sed -n "s/^Packages $VERSION_CODENAME main //p" | head -n 1)
  [ -n "$archive" ] || die "no archive of $VERSION_CODENAME among this machine's package sources"
  keys=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$keys] $archive $VERSION_CODENAME-backports main" > apt/sources.list
  own apt-get update -qq || die "$VERSION_CODENAME-backports cannot be read from $archive"
  if known own linux-image-amd64; then from=own; fi
fi

wanted=()
for meta in linux-image-amd64 linux-image-generic; do
  kernel=$(depends_of "$from" "$meta" | grep -m 1 -E '^linux-image-[0-9]') || continue
  wanted=("$kernel")
  for more in "linux-modules-${kernel#linux-image-}" "linux-modules-extra-${kernel#linux-image-}"; do
    if known "$from" "$more"; then wanted+=("$more"); fi
  done
  break
done
[ ${#wanted[@]} -gt 0 ] || die "no kernel package with all drivers in the package lists"
if [ -z "$(qemu-system-x86_64 -device igb,help 2>/dev/null)" ]; then
  [ "$from" = own ] || die "this distribution's QEMU is older than 8.0"
  wanted+=(qemu-system-x86 qemu-system-common qemu-system-data)
fi
printf 'vfio machine: downloading %s\n' "${wanted[*]}"
"$from" apt-get download -qq "${wanted[@]}" || die "a package could not be downloaded"
rm -rf apt
touch complete
