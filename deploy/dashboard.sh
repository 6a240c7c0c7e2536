#!/usr/bin/env bash
# Builds the dashboard's page into build/dashboard/dist, with npm packages from package-lock.json, without running their scripts.
# Does nothing if the inputs are unchanged. Runs from any directory; needs node and npm.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'dashboard: %s\n' "$*"; }
die() { printf 'dashboard: %s\n' "$*" >&2; exit 1; }

web=virtshim/dashboard/web
out=build/dashboard
inputs=$(cat deploy/dashboard.sh <(find "$web" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) | sha256sum | cut -d' ' -f1)
[ "$(cat "$out/dist.inputs" 2>/dev/null || true)" != "$inputs" ] || [ ! -f "$out/dist/index.html" ] || exit 0
command -v npm >/dev/null || die "needs npm: apt-get install npm, or Node.js from elsewhere"

mkdir -p "$out"
# Two builds at once would remove each other's files.
exec 9> "$out/lock"
flock 9
packages=$(sha256sum "$web/package-lock.json" | cut -d' ' -f1)
if [ "$(cat "$out/packages" 2>/dev/null || true)" != "$packages" ]; then
  say "fetching what $web/package-lock.json names"
  rm -f "$out/packages"
  cp "$web/package.json" "$web/package-lock.json" "$out/"
  (cd "$out" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null)
  echo "$packages" > "$out/packages"
fi

say "building the page"
rm -rf "$out/new" "$out/dist.inputs"
mkdir -p "$out/new"
NODE_PATH="$out/node_modules" "$out/node_modules/.bin/esbuild" "$web/src/main.js" --bundle --format=esm --splitting --minify \
  --target=es2022,chrome123,firefox121,safari17.5 --charset=utf8 --legal-comments=none --chunk-names=part-[hash] \
  --log-level=warning --outdir="$out/new"
# A part's code is one file and its styles another, which only the page itself can load.
cat "$out"/new/*.css > "$out/new.css"
rm "$out"/new/*.css
mv "$out/new.css" "$out/new/main.css"
cp "$web/index.html" "$web/icon.svg" "$out/new/"
{
  echo "The page of virtshim's dashboard contains these programs of others, as published on npm, unchanged but for bundling."
  for package in @xterm/xterm @xterm/addon-fit @novnc/novnc; do
    printf '\n==== %s %s, https://www.npmjs.com/package/%s\n\n' "$package" \
      "$(sed -n 's/^ *"version": "\(.*\)",\?$/\1/p' "$out/node_modules/$package/package.json" | head -1)" "$package"
    find "$out/node_modules/$package" -iname 'LICENSE*' -type f -print0 | LC_ALL=C sort -z | xargs -0 cat
  done
} > "$out/new/LICENSES.txt"
rm -rf "$out/dist"
mv "$out/new" "$out/dist"
echo "$inputs" > "$out/dist.inputs"
say "$(du -sh "$out/dist" | cut -f1) in $out/dist"
