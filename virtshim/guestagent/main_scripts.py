"""The scripts around a container's own command (see `guest_scripts` for what they need of the guest; and `dd`). Pure.

The command outlives virtshim and the agent's memory of it, so all that is to be known of it lies in files in the guest, in a
directory that is gone after a reboot of the guest:

    pid                   of the shell that waits for the command
    stdout.N, stderr.N    pieces of output, at most 256 KiB each, numbered from 0; a piece is complete when the next is there
    stdout.end ...        there will be no more pieces
    exit                  `exit CODE`, or `fail WORD VALUE` (see `command_output.failure`)

Whoever has read a piece empties it. With eight that are not empty the output waits, and so does the command: a guest's memory
is not filled by a command whose output nobody reads.
"""

from __future__ import annotations

from typing import Final

from virtshim.guestagent.guest_scripts import AS_USER

# The directory must not be there: making it is what lets a command run once only. It lies on a tmpfs.
DIRECTORY: Final = "/run/virtshim-command"

# Arguments: directory, working directory, user, group, supplementary groups (commas), whether the user's own groups are added
# (1), the file for its termination message ("" for none), then the command. It leaves the agent's cgroup, for a restart of the
# agent's service kills all that is in there.
START: Final = (
    r"""
base=$1 dir=$2 user=$3 group=$4 groups=$5 own=$6 report=$7
shift 7
(umask 077 && mkdir "$base") 2>/dev/null || exit 82
echo $$ >"$base/pid"
conclude() {
  printf '%s\n' "$1" >"$base/new"
  mv "$base/new" "$base/exit"
}
fail() {
  conclude "fail $1"
  exit 1
}
for procs in /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/systemd/cgroup.procs; do
  [ ! -w "$procs" ] || (echo $$ >"$procs") 2>/dev/null
done
command -v dd >/dev/null || fail "tool dd"
if [ -n "$report" ]; then
  [ -e "$report" ] || mkdir -p "${report%/*}" 2>/dev/null
  [ -e "$report" ] && [ ! -f "$report" ] || (: >"$report" && chmod 0666 "$report") 2>/dev/null
fi
[ -z "$dir" ] || cd "$dir" 2>/dev/null || fail "directory $dir"
"""
    + AS_USER
    + r"""
keep() {
  n=0
  while :; do
    dd bs=4096 count=64 of="$base/$1.$n" 2>/dev/null
    [ -s "$base/$1.$n" ] || break
    n=$((n + 1))
    old=$((n - 8))
    [ "$old" -ge 0 ] || continue
    while [ -s "$base/$1.$old" ]; do
      sleep 0.2 2>/dev/null || sleep 1
    done
    rm -f "$base/$1.$old"
  done
  : >"$base/$1.end"
}
{
  {
    (exec "$@" </dev/null 2>&1 >&5 5>&-)
    conclude "exit $?"
  } | keep stderr 5>&-
} 5>&1 | keep stdout
"""
)

# Argument: directory. 0: it runs or has ended, else it is lost.
STILL_THERE: Final = r"""
[ ! -e "$1/exit" ] || exit 0
read -r pid <"$1/pid" && kill -0 "$pid" 2>/dev/null
"""
