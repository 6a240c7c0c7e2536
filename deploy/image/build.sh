#!/usr/bin/env bash
# Builds the image that installs virtshim onto nodes: an OCI archive with Debian's python3, the package's files and on_node.py.
#
#   build.sh DEB OUT.tar     (IMAGE_CACHE: keeps the base, default build/image; IMAGE_BASE: a tar to use instead)
#   build.sh --base          only makes the base; the rest needs no network
#
# The same package and the same base give the same bytes: times are SOURCE_DATE_EPOCH, by default that of the last commit.
# It needs no registry: mmdebstrap makes the base from Debian's packages, for the distribution that this runs on, as for the package.
# Load it: skopeo copy oci-archive:OUT.tar docker://REGISTRY/virtshim:VERSION, or on a node: ctr -n k8s.io images import OUT.tar
set -euo pipefail

say() { printf 'image: %s\n' "$*"; }
die() { printf 'image: %s\n' "$*" >&2; exit 1; }

[ $# = 2 ] || [ "$*" = --base ] || die "usage: $0 DEB OUT.tar | --base"
[ "$(id -u)" = 0 ] || die "needs root: it installs packages into a directory. Try: sudo make image"
for tool in buildah mmdebstrap dpkg-deb; do
  command -v $tool >/dev/null || die "$tool is missing; run: make setup"
done
[ "$1" = --base ] || [ -e "$1" ] || die "$1 does not exist; run: make deb"
here=$(cd "$(dirname "$0")" && pwd)
cache=${IMAGE_CACHE:-$here/../../build/image}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$here" log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
work=$(mktemp -d "${TMPDIR:-/tmp}/virtshim-image.XXXXXX")
trap 'rm -rf "$work"' EXIT

# ---- the base ------------------------------------------------------------------------------------------------------

base=${IMAGE_BASE:-}
if [ -z "$base" ]; then
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mkdir -p "$cache"
  exec 9> "$cache/lock"
  flock 9
  base=$cache/base-$codename-$(sha256sum "$here/build.sh" | cut -c1-16).tar
  if [ ! -e "$base" ]; then
    say "installing python3 of $codename into a base"
    mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 2>/dev/null | sed -n "s/^$codename main //p" | head -n 1)
    options=(
      --quiet --mode=root --variant=essential --format=tar --include=python3
      --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"'
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*'
    )
    proxy=$(apt-config dump --format '%v%n' Acquire::http::Proxy)
    [ -z "$proxy" ] || options+=(--aptopt="Acquire::http::Proxy \"$proxy\"")
    unshare --mount mmdebstrap "${options[@]}" "$codename" "$work/base.tar" ${mirror:+"$mirror"} > "$work/log" 2>&1 ||
      { tail -n 20 "$work/log" >&2; die "mmdebstrap failed"; }
    rm -f "$cache"/base-*.tar
    mv "$work/base.tar" "$base"
  fi
  flock -u 9
fi
[ "$1" != --base ] || exit 0

# ---- the image -----------------------------------------------------------------------------------------------------

deb=$(realpath "$1")
mkdir -p "$(dirname "$2")"
out=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
whole=$(dpkg-deb --field "$deb" Version)
# A tag has no ~.
version=${whole%~*}
say "putting $(basename "$deb") into it"
mkdir "$work/payload"
dpkg-deb --extract "$deb" "$work/payload"
printf '%s %s\n' "$whole" "$(sha256sum "$deb" | cut -c1-16)" > "$work/payload/.version"
install -D -m 755 "$here/on_node.py" "$work/program/usr/local/bin/on_node.py"

# buildah's images are below the work directory. Only its cache of blobs' digests remains, /var/lib/containers/cache.
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
in_work() { buildah --root "$work/store" --runroot "$work/run" "$@"; }
container=$(in_work from scratch)
in_work add --quiet "$container" "$base" / > /dev/null
in_work copy --quiet "$container" "$work/program" / > /dev/null
in_work copy --quiet "$container" "$work/payload" /payload > /dev/null
in_work config --entrypoint '["/usr/bin/python3", "-I", "/usr/local/bin/on_node.py"]' --cmd run \
  --env PATH=/usr/sbin:/usr/bin:/sbin:/bin --label org.opencontainers.image.title=virtshim \
  --label "org.opencontainers.image.version=$version" --label org.opencontainers.image.licenses=Apache-2.0 "$container"
in_work commit --quiet --timestamp "$SOURCE_DATE_EPOCH" --format oci --disable-compression=false "$container" "oci:$work/image:docker.io/library/virtshim:$version" > /dev/null
# An OCI archive, as buildah's own, but without the time of the build.
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work/image" -cf "$work/image.tar" oci-layout index.json blobs
mv "$work/image.tar" "$out"
say "$out: $(($(stat -c %s "$out") >> 20)) MiB, virtshim:$version"
