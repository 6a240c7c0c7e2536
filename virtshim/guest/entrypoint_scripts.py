"""The scripts around a container's entrypoint. They need `dd`, and what `exec_scripts` needs of the guest. Pure.

The command outlives virtshim and the agent's memory of it. Everything about it is therefore in files in the guest, in a
directory that a reboot of the guest removes:

    pid                   of the shell that waits for the command
    command               the command's own pid
    user                  its user at the start: three lines of its /proc/PID/status, as one
    stdout.N, stderr.N    pieces of output, at most 256 KiB each, numbered from 0; a piece is complete when the next exists
    stdout.end ...        no more pieces follow
    stdin, over           pipes: its input, and what ends the input, for a command that has one
    tty                   the path of its terminal
    exit                  `exit CODE`, or `fail WORD VALUE` (see `command_output.failure`)

Whoever has read a piece empties it. When eight pieces are not empty, the output waits, and so does the command, so that
unread output does not fill a guest's memory.
"""

from __future__ import annotations

from typing import Final

from virtshim.guest.exec_scripts import AS_USER, QUOTED
from virtshim.model.ids import ContainerId

# On a tmpfs. Making the directory fails if it exists, which lets a command run only once.
DIRECTORY: Final = "/run/virtshim-command"

# Turns the command, "$@", into one that first writes its user into descriptor 8. A file that root opened stays open for
# another user.
_TELL_USER: Final = r"""
set -- /bin/sh -c '
  {
    told=
    while read -r line; do
      case $line in
        Uid:* | Gid:*) told="$told$line;" ;;
        Groups:*) echo "$told$line" >&8 && break ;;
      esac
    done </proc/$$/status
  } 2>/dev/null
  exec "$@" 8>&-' sh "$@"
"""

# Turns the command, "$@", into one that sees the guest's root read-only, in its own mount namespace. This happens
# before it changes its user. What is mounted below (volumes, /run, /dev) stays writable, and so does the file for its
# termination message.
_SEALED: Final = r"""
if [ -n "$sealed" ]; then
  has unshare || fail "tool unshare"
  set -- unshare -m /bin/sh -c '
    { [ ! -f "$0" ] || mount -o bind "$0" "$0"; } && mount -o remount,bind,ro / || exit 126
    exec "$@"' "${report:-/}" "$@"
fi
"""

# Arguments: directory, working directory, user, group, supplementary groups (commas), whether the user's own groups are
# added (1), the file for its termination message ("" for none), whether it has an input (1), the size of its terminal
# ("ROWS COLUMNS", "" for none), limits, whether the root is read-only for it (1), then the command. The script leaves
# the agent's cgroup, because a restart of the agent's service kills everything in that.
START: Final = (
    r"""
base=$1 dir=$2 user=$3 group=$4 groups=$5 own=$6 report=$7 feed=$8 size=$9
shift 9
limits=$1 sealed=$2
shift 2
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
    + _TELL_USER
    + AS_USER
    + _SEALED
    + r"""
feeder=
exec 7</dev/null
if [ -n "$feed" ]; then
  mkfifo "$base/new.over" "$base/stdin" || fail "tool mkfifo"
  # Open before the end can come: what is written into a pipe that nobody has open is lost, and a pipe whose last writer has gone
  # could not be opened to be read.
  exec 4<>"$base/new.over" 6<>"$base/stdin" 7<"$base/stdin"
  mv "$base/new.over" "$base/over"
  (read -r _ <&4) </dev/null >/dev/null 2>&1 7<&- &
  feeder=$!
  exec 4<&- 6<&-
fi
if [ -n "$size" ]; then
"""
    + QUOTED
    + r"""  rows=${size% *} columns=${size#* }
  inside="stty sane rows $rows cols $columns 2>/dev/null; tty >'$base/tty'"
  [ -z "$user" ] || inside="$inside; chown $user \"\$(tty)\" 2>/dev/null"
  inside="$inside; echo \$\$ >'$base/command'; exec$quoted 8>'$base/user'"
  if command -v script >/dev/null; then
    set -- env SHELL=/bin/sh script -qefc "$inside" /dev/null
  elif command -v python3 >/dev/null; then
    set -- python3 -c 'import os,pty,sys
code = os.waitstatus_to_exitcode(pty.spawn(["/bin/sh", "-c", sys.argv[1]]))
sys.exit(code if code >= 0 else 128 - code)' "$inside"
  else
    fail "tool script"
  fi
fi
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
    (exec sh -c 'echo $$ >"$0/command"; exec "$@" 8>"$0/user"' "$base" "$@" <&7 2>&1 >&5 5>&- 7<&-)
    conclude "exit $?"
    [ -z "$feeder" ] || kill "$feeder" 2>/dev/null
  } | keep stderr 5>&- 7<&-
} 5>&1 | keep stdout 7<&-
"""
)

# Argument: directory. Exit code 0: the command runs or has ended; otherwise it is lost.
IS_KNOWN: Final = r"""
[ ! -e "$1/exit" ] || exit 0
read -r pid <"$1/pid" && kill -0 "$pid" 2>/dev/null
"""

# For `Entrypoint.signal`. Arguments: directory, signal number or 0. Exit code 0: the command runs and has received the signal.
SIGNAL: Final = r"""
until [ -s "$1/command" ]; do
  [ -e "$1/pid" ] && [ ! -e "$1/exit" ] || exit 1
  sleep 0.2 2>/dev/null || sleep 1
done
[ ! -e "$1/exit" ] || exit 1
read -r pid <"$1/command" && kill -"$2" "$pid" 2>/dev/null
"""

# Argument: directory. Passes its input on to the command's input, which others may write to as well.
RELAY: Final = r"""
until [ -p "$1/stdin" ]; do
  [ ! -e "$1/exit" ] || exit 0
  sleep 0.2 2>/dev/null || sleep 1
done
exec cat >"$1/stdin"
"""

# Argument: directory. Opens the pipe for reading and writing, so that it waits for nobody.
END_INPUT: Final = r"""
until [ -p "$1/over" ]; do
  [ ! -e "$1/exit" ] || exit 0
  sleep 0.2 2>/dev/null || sleep 1
done
exec 3<>"$1/over"
echo >&3
"""

# Arguments: directory, rows, columns.
RESIZE: Final = r"""
read -r tty <"$1/tty" && stty rows "$2" cols "$3" <"$tty"
"""


def directory(container: ContainerId) -> str:
    return f"{DIRECTORY}-{container.short}"
