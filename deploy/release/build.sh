#!/usr/bin/env bash
# Builds all that a release publishes: the packages, the image, the manifests, kubectl's plugin, the bill of materials, the changelog,
# and the checksums of all.
#
#   build.sh DIRECTORY [URL]    (URL: where the files will be published, for the krew manifest; default https://example.com/virtshim;
#                                DEBFULLNAME, DEBEMAIL: who publishes them, the packages' maintainer; FOR: the distributions of the
#                                packages, as "bookworm trixie noble"; default that of this machine, which also is the image's)
#
# The same commit on the same distribution gives the same bytes.
set -euo pipefail

say() { printf 'release: %s\n' "$*"; }
die() { printf 'release: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || [ $# = 2 ] || die "usage: $0 DIRECTORY [URL]"
url=${2:-https://example.com/virtshim}
[[ $url =~ ^https://[A-Za-z0-9./_-]+$ ]] || die "URL '$url' must begin with https:// and have letters, digits and ./_- only"
out=$(realpath -m "$1")
[ ! -e "$out" ] || die "$out exists; name a new directory"
cd "$(dirname "$0")/../.."
[ -z "$(git status --porcelain)" ] || die "the work tree has changes; a release is made of a commit"
[ -n "${DEBFULLNAME:-}" ] && [ -n "${DEBEMAIL:-}" ] ||
  die "who publishes the packages? Set DEBFULLNAME and DEBEMAIL, which become their maintainer"
mkdir -p "$out"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022

# packed ARCHIVE TAR-ARGUMENTS...
packed() {
  local archive=$1
  shift
  tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw -c "$@" | gzip -9n > "$archive"
}

own=$(deploy/deb/build.sh --name)
deploy/deb/build.sh "$out"
for suite in ${FOR:-}; do
  [ "$suite" = "$(. /etc/os-release && echo "$VERSION_CODENAME")" ] || deploy/deb/elsewhere.sh "$suite" "$out"
done
deploy/image/build.sh "$out/$own" "$out/virtshim-image_$version.tar"
say "manifests, kubectl's plugin, bill of materials"
packed "$out/virtshim-manifests_$version.tar.gz" -C deploy --transform "s|^|virtshim-$version/|" \
  kustomize events.yaml monitoring
packed "$out/kubectl-virt_$version.tar.gz" -C deploy/kubectl-virt kubectl-virt -C ../.. LICENSE
digest=$(sha256sum "$out/kubectl-virt_$version.tar.gz" | cut -d' ' -f1)
sed -e '/^#/d' -e "s|^  version: .*|  version: v$version|" -e "s|^  homepage: .*|  homepage: $url|" \
  -e "s|^      uri: .*|      uri: $url/kubectl-virt_$version.tar.gz|" -e "s|^      sha256: .*|      sha256: \"$digest\"|" \
  deploy/kubectl-virt/krew.yaml > "$out/virt.yaml"
.venv/bin/python deploy/release/bom.py "$version" requirements-run.lock > "$out/virtshim_$version.cdx.json"
install -m 644 CHANGELOG.md "$out/"
(cd "$out" && sha256sum -- * > SHA256SUMS)
say "$out has version $version"
