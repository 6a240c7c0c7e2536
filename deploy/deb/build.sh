#!/usr/bin/env bash
# Builds the Debian package of a node, for the distribution that it is built on: virtshim_VERSION~deb12_amd64.deb on Debian 12,
# virtshim_VERSION~ubuntu24.04_amd64.deb on Ubuntu 24.04. elsewhere.sh runs it in another distribution.
#
#   build.sh DIRECTORY [VERSION]    (VERSION: default that of pyproject.toml; DEB_CACHE: keeps the built locked packages, default
#                                    build/deb; DEBFULLNAME, DEBEMAIL: the package's maintainer, who builds it for others)
#   build.sh --packages             only fetches and builds the locked packages; the rest needs no network
#   build.sh --name [VERSION]       only prints the name of the package's file
#
# The same sources on the same distribution give the same bytes: times are SOURCE_DATE_EPOCH, by default that of the last commit. The
# Python packages are those of the locks, checked by their hashes, in a virtual environment below /usr/lib/virtshim. They work with
# the distribution's own version of Python alone, so the package depends on this version.
set -euo pipefail

say() { printf 'deb: %s\n' "$*"; }
die() { printf 'deb: %s\n' "$*" >&2; exit 1; }

[ $# = 1 ] || [ $# = 2 ] || die "usage: $0 DIRECTORY [VERSION] | --packages | --name [VERSION]"
here=$(cd "$(dirname "$0")" && pwd)
case $1 in
  --*) ;;
  *) mkdir -p "$1" && out=$(cd "$1" && pwd) ;;
esac
cd "$here/../.."
version=${2:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
[[ $version =~ ^[0-9][0-9a-z.+]*$ ]] || die "VERSION '$version' is not one for Python and Debian alike; as 0.2.0 or 0.2.0+site1"
# Lower than VERSION itself, and higher on a newer release of the distribution, so that apt upgrades the package with the node.
built_for=$(. /etc/os-release && echo "${ID/debian/deb}${VERSION_ID:-$VERSION_CODENAME}")
file_name=virtshim_$version~${built_for}_amd64.deb
if [ "$1" = --name ]; then echo "$file_name" && exit 0; fi
[ "$(dpkg --print-architecture)" = amd64 ] || die "knows only amd64"
maintainer="${DEBFULLNAME:-the builder of this package} <${DEBEMAIL:-root@localhost}>"
[[ $maintainer =~ ^[^\<\>@,]+\ \<[^\<\>@\ ,]+@[^\<\>@\ ,]+\>$ ]] || die "DEBFULLNAME and DEBEMAIL make no maintainer: $maintainer"
for tool in dpkg-deb gcc pkg-config gzip strip; do
  command -v $tool >/dev/null || die "$tool is missing; run: make setup"
done
pkg-config --exists libvirt || die "libvirt's headers are missing; run: make setup"

in_git=$(git rev-parse --is-inside-work-tree 2>/dev/null || true)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$([ "$in_git" = true ] && git log -1 --format=%ct || date +%s)}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC PYTHONHASHSEED=0
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
umask 022

python=/usr/bin/python3
python_version=$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Each release's own Python, and the package that has virtiofsd there. For an upgraded package apt installs what is newly recommended,
# but nothing that the earlier version recommended in vain. So the package for Debian 12 must not name virtiofsd, which Debian 12 does
# not have: only then does a node that goes on to Debian 13 get it with the package for 13.
virtiofsd=virtiofsd
case $built_for in
  deb12) own_python=3.11 virtiofsd=qemu-system-common ;;
  deb13) own_python=3.13 ;;
  ubuntu24.04) own_python=3.12 ;;
  *) own_python=$python_version && say "this recipe does not know $built_for, and takes Python $python_version for its own" ;;
esac
[ "$python_version" = "$own_python" ] ||
  die "$python is Python $python_version, but $built_for has Python $own_python, on which the package must depend"

work=$(mktemp -d "${TMPDIR:-/tmp}/virtshim-deb.XXXXXX")
trap 'rm -rf "$work"' EXIT

# ---- packages of the locks, built once ------------------------------------------------------------------------------

# Removes what dpkg records anyway, and pip's notes about the time and place of the build.
without_notes() {
  rm -rf "$1/bin"
  find "$1" -type f -perm /111 ! -name '*.so*' -exec chmod 644 {} +
  find "$1" \( -path '*.dist-info/RECORD' -o -path '*.dist-info/INSTALLER' -o -path '*.dist-info/REQUESTED' \
    -o -path '*.dist-info/direct_url.json' \) -delete
}
# A module is no program, so it names no interpreter; and a node debugs no library of others.
as_library() {
  find "$1" -name '*.py' -exec sed -i '1s/^#!.*/#/' {} +
  find "$1" -name '*.so*' -type f -exec strip --strip-unneeded --remove-section=.comment {} +
}
# compiled DIRECTORY PREFIX: Python does not check the result against its source, because dpkg installs both.
compiled() {
  $python -m compileall -q -j 1 --invalidation-mode unchecked-hash -s "$2" -p / "$1" >/dev/null ||
    die "a module of $1 cannot be compiled"
}
site=usr/lib/virtshim/lib/python$python_version/site-packages

inputs=$( (cat requirements-build.lock requirements-run.lock "$here/build.sh"; $python --version
  pkg-config --modversion libvirt; gcc --version; strip --version) | sha256sum | cut -d' ' -f1)
cache=${DEB_CACHE:-$PWD/build/deb}
mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9
layer=$cache/$inputs
if [ ! -e "$layer" ]; then
  say "building the packages of the locks"
  rm -rf "$cache"/*/ "$cache"/new.*
  new=$(mktemp -d "$cache/new.XXXXXX")
  $python -m venv "$new/builder"
  pip="$new/builder/bin/python -m pip --quiet --disable-pip-version-check"
  $pip install --require-hashes --only-binary :all: -r requirements-build.lock
  # The package must not contain paths of this build.
  CFLAGS=-g0 $pip install --require-hashes --no-build-isolation --only-binary :all: --no-binary libvirt-python \
    --no-compile --target "$new/root/$site" -r requirements-run.lock
  without_notes "$new/root/$site"
  as_library "$new/root/$site"
  compiled "$new/root/$site" "$new/root"
  mv "$new" "$layer"
fi
[ "$1" != --packages ] || exit 0

# ---- the project ----------------------------------------------------------------------------------------------------

say "staging virtshim $version"
root=$work/root
source=$work/source
mkdir -p "$root" "$source" "$work/own/$site"
cp -a "$layer/root/." "$root/"
if [ "$in_git" = true ]; then
  git ls-files -z --cached --others --exclude-standard -- . ':!tests' ':!build' | tar -c --null -T - --ignore-failed-read | tar -x -C "$source"
else
  tar -c --exclude=./tests --exclude=./build --exclude=./dist --exclude=./.venv . | tar -x -C "$source"
fi
# deploy/dashboard.sh builds the dashboard's page beside the sources; `make setup` calls it.
if [ -f build/dashboard/dist/index.html ]; then
  mkdir -p "$source/build/dashboard"
  cp -r build/dashboard/dist "$source/build/dashboard/"
fi
sed -i "s/^version = \".*\"$/version = \"$version\"/" "$source/pyproject.toml"
pip="$layer/builder/bin/python -m pip --quiet --disable-pip-version-check"
$pip install --no-index --no-deps --no-build-isolation --no-compile --target "$work/own/$site" "$source"
flock -u 9
entries=$(sed -n 's/^\([a-z-]*\) = \([a-z._]*\):\([a-z]*\)$/\1 \2 \3/p' "$work/own/$site"/virtshim-*.dist-info/entry_points.txt)
without_notes "$work/own/$site"
compiled "$work/own/$site" "$work/own"
cp -a "$work/own/." "$root/"

home=$root/usr/lib/virtshim
mkdir -p "$home/bin"
ln -s "../../../bin/python$python_version" "$home/bin/python3"
ln -s python3 "$home/bin/python"
printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "$python_version" > "$home/pyvenv.cfg"
while read -r name module function; do
  # Isolated, so that no code comes from root's environment or working directory.
  cat > "$home/bin/$name" <<END
#!/usr/lib/virtshim/bin/python3 -I
import sys

from $module import $function

sys.exit($function())
END
  chmod 755 "$home/bin/$name"
done <<< "$entries"
mkdir -p "$root/usr/bin" "$root/usr/libexec/virtshim"
ln -s ../lib/virtshim/bin/virtshim "$root/usr/bin/virtshim"
(cd "$source" && PYTHONPATH=$root/$site $python -m vmwrapper.bundle "$root/usr/libexec/virtshim/vmwrapper")

# ---- what the distribution's own programs read ----------------------------------------------------------------------

put() { install -D -m 644 "$1" "$root/$2"; }
for unit in systemd/*.service systemd/*.socket; do
  put "$unit" "usr/lib/systemd/system/${unit##*/}"
  sed -i 's|/usr/local/bin/|/usr/lib/virtshim/bin/|' "$root/usr/lib/systemd/system/${unit##*/}"
done
put systemd/virtshim-sysusers.conf usr/lib/sysusers.d/virtshim.conf
put systemd/virtshim-tmpfiles.conf usr/lib/tmpfiles.d/virtshim.conf
for file in deploy/cni/* deploy/kubelet/* deploy/monitoring/* deploy/*.yaml deploy/libvirt-guests.conf; do
  put "$file" "usr/share/virtshim/${file#deploy/}"
done
find deploy/kustomize -type f | while read -r file; do put "$file" "usr/share/virtshim/${file#deploy/}"; done
# For a Prometheus that knows no PrometheusRule.
sed '1,/^spec:$/d; s/^  //' deploy/kustomize/overlays/monitoring/alerts.yaml > "$root/usr/share/virtshim/monitoring/alerts.yaml"
install -D -m 755 deploy/flexvolume_driver "$root/usr/share/virtshim/flexvolume_driver"
(cd "$source" && PYTHONPATH=$root/$site:$here/.. $python -B -m deb.derived "$root" "$version")

doc=usr/share/doc/virtshim
for file in docs/*; do [ ! -f "$file" ] || put "$file" "$doc/${file##*/}"; done
for file in docs/how-to/* docs/dev/*; do put "$file" "$doc/${file#docs/}"; done
for file in README.md CHANGELOG.md; do put "$file" "$doc/$file"; done
sed -i 's|(docs/|(|g' "$root/$doc/README.md"
put "$here/copyright" "$doc/copyright"
# A line that begins with @RELEASE@ is for the lintian of that release.
mkdir -p "$root/usr/share/lintian/overrides"
sed "s/^@$built_for@ //; /^@/d" "$here/lintian-overrides" > "$root/usr/share/lintian/overrides/virtshim"
cat > "$root/$doc/changelog" <<END
virtshim ($version~$built_for) unstable; urgency=medium

  * What is new is in CHANGELOG.md, beside this file.

 -- $maintainer  $(date -R -d "@$SOURCE_DATE_EPOCH")
END
find "$root/usr/share/man" "$root/$doc/changelog" -type f -exec gzip -9n {} +

# ---- the package ----------------------------------------------------------------------------------------------------

mkdir -p "$root/DEBIAN"
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) > "$work/md5sums"
# As dpkg counts: files in whole KiB, and one for everything else.
size=$(find "$root" -printf '%y %s\n' | awk '{sum += $1 == "f" ? int(($2 + 1023) / 1024) : 1} END {print sum}')
upstream() { dpkg-query -W -f '${Version}' "$1" | sed 's/^[0-9]*://; s/[-+].*//'; }
install -m 644 "$work/md5sums" "$root/DEBIAN/md5sums"
sed "s/@VERSION@/$version~$built_for/; s/@SIZE@/$size/; s/@PYTHON@/$python_version/g; s/@VIRTIOFSD@/$virtiofsd/; s/@MAINTAINER@/${maintainer//[\/&]/\\\\&}/
  s/@LIBC@/$(upstream libc6)/; s/@LIBVIRT@/$(upstream libvirt0)/" "$here/control" |
  sed ':more; /^[A-Za-z-]*s:.*,$/{N; s/,\n */, /; b more}' > "$root/DEBIAN/control"
sed "s/@PYTHON@/$python_version/g; s/@BUILT_FOR@/$built_for/g" "$here/preinst" > "$root/DEBIAN/preinst"
chmod 755 "$root/DEBIAN/preinst"
install -m 755 "$here"/{postinst,prerm,postrm} "$root/DEBIAN/"
find "$root" -type d -exec chmod 755 {} +
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
package=$out/$file_name
# With one thread the bytes do not depend on the number of processors.
dpkg-deb --root-owner-group -Zxz -z1 --threads-max=1 --build "$root" "$work/package" >/dev/null
mv "$work/package" "$package"
say "$package: $(($(stat -c %s "$package") >> 20)) MiB, $((size >> 10)) MiB installed"
