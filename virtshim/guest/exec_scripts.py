"""POSIX shell scripts that run in the guest, passed to `/bin/sh -c` as arguments. virtshim installs nothing in the
guest. Pure.

They need what every Linux image with the agent has: sh, cat, grep, printf, setsid (util-linux or busybox), /proc and
/sys/class/virtio-ports. A terminal needs util-linux's `script`, or python3. Another user needs util-linux's `setpriv`,
coreutils' `chroot`, python3, or, with limits, busybox's `start-stop-daemon` or `setuidgid`, or `su`.

RUN relays the command's streams between pipes and virtio-serial ports. The command never holds a port itself, because a
daemon that it leaves behind would keep the port, and a port can be open only once. Records, `\\1TOKEN WORD [VALUE];`,
are written between the data (see `command_output`). The byte 1 distinguishes them from the token in command lines,
which `ps` shows.

    start       all ports are open: earlier data is from an earlier session
    tty PATH    the command's terminal
    fail WORD VALUE  the command cannot be started, and why
    exit CODE   the command itself has ended; processes that it left may still write
    end         no more data on this port

KILL finds every shell of RUN by the tag in its command line. The tag is a line of its own within the script, because
busybox's grep only sees the part of a line up to its first NUL.
"""

from __future__ import annotations

from typing import Final

from virtshim.model.container import RunAs

# Turns the command, "$@", into one that runs as `user`, `group`, `groups` and `own` say, and within `limits` (the
# function's words) if the guest has setpriv. Needs a function `fail`. It tries the most capable tool first: busybox's
# tools only know users of /etc/passwd, and give them the groups listed there, or none.
AS_USER: Final = r"""become() {
  name= home= primary= mine= extra=$groups
  while IFS=: read -r n _ id gid _ h _; do
    [ "$n" = "$user" ] || [ "$id" = "$user" ] || continue
    name=$n user=$id primary=$gid home=$h
    break
  done </etc/passwd
  case $user in *[!0-9]*) fail "user $user" ;; esac
  group=${group:-${primary:-0}}
  [ -n "${HOME-}" ] || export HOME="${home:-/}"
  [ -z "$name" ] || while IFS=: read -r _ _ id members; do
    case ,$members, in *",$name,"*) mine=$mine${mine:+,}$id ;; esac
  done </etc/group
  [ "$own" != 1 ] || groups=$extra${extra:+${mine:+,}}$mine
}
has() { command -v "$1" >/dev/null; }
setpriv=
if [ -n "$user$groups$limits" ]; then
  case $(setpriv --help 2>&1) in *--reuid*) setpriv=1 ;; *) limits= ;; esac
fi
if [ -z "$user" ] && [ -n "$groups" ]; then
  # Root gets them where a tool can give them, and needs none to get at files.
  case $setpriv$(chroot --help 2>&1) in 1* | *--userspec*) user=0 ;; esac
fi
if [ -n "$user" ]; then
  become
  if [ -n "$setpriv" ]; then
    if [ -n "$groups" ]; then set -- --groups="$groups" "$@"; else set -- --clear-groups "$@"; fi
    set -- setpriv --reuid="$user" --regid="$group" $limits "$@"
  else
    case $(chroot --help 2>&1) in
      *--userspec*) set -- chroot --skip-chdir --userspec="$user:$group" --groups="$groups" / "$@" ;;
      *)
        if has python3; then
          set -- python3 -IS -c 'import os, sys
user, group, groups = sys.argv[1:4]
os.setgroups([int(one) for one in groups.split(",") if one])
os.setgid(int(group))
os.setuid(int(user))
try:
    os.execvp(sys.argv[4], sys.argv[4:])
except OSError as exc:
    sys.stderr.write(f"{sys.argv[4]}: {exc.strerror}\n")
    sys.exit(127 if isinstance(exc, FileNotFoundError) else 126)' "$user" "$group" "$groups" "$@"
        elif [ -z "$name" ] || [ -n "$extra" ]; then
          fail "tool setpriv"
        elif [ "$own" = 1 ] || [ -z "$mine" ]; then
          case $(start-stop-daemon --help 2>&1) in
            *BusyBox*)
              program=$(command -v "$1" || echo "$1")
              shift
              set -- start-stop-daemon -S -q -p /nonexistent/pid -c "$user:$group" -x "$program" -- "$@"
              ;;
            *)
              [ "$group" = "$primary" ] && has su || fail "tool setpriv"
              set -- su -m -s /bin/sh -c 'exec "$@"' -- "$name" sh "$@"
              ;;
          esac
        else
          [ "$group" = "$primary" ] && has setuidgid || fail "tool setpriv"
          set -- setuidgid "$name" "$@"
        fi
        ;;
    esac
  fi
elif [ -n "$limits" ]; then
  set -- setpriv $limits "$@"
fi
"""

# $quoted is the command as one line for a shell.
QUOTED: Final = r"""  quoted=
  for word; do
    quoted="$quoted '"
    while :; do
      case $word in
        *\'*)
          quoted=$quoted${word%%\'*}"'\\''"
          word=${word#*\'}
          ;;
        *) break ;;
      esac
    done
    quoted="$quoted$word'"
  done
"""

# Arguments: token, ports for stdout, stderr ("" with a terminal) and stdin ("" for none),
# working directory, user, group, supplementary groups (commas), whether the user's own groups are added (1),
# terminal size ("ROWS COLUMNS", "" for no terminal), limits, then the command.
_PORTS: Final = r"""
token=$1 out=$2 err=$3 in=$4 dir=$5 user=$6 group=$7 groups=$8 own=$9
shift 9
size=$1 limits=$2
shift 2
port() {
  dev=/dev/virtio-ports/$1
  [ ! -c "$dev" ] || return 0
  for sys in /sys/class/virtio-ports/vport*p$((${1##*.} + 2)); do
    dev=/dev/${sys##*/}
    read -r name <"$sys/name" && [ "$name" = "$1" ] && [ -c "$dev" ] && return 0
  done
  exit 81
}
tell() { printf '\001%s %s;' "$token" "$1"; }
fail() {
  tell "fail $1" >&8
  exit 1
}
port "$out"
exec 8>"$dev"
if [ -n "$err" ]; then
  port "$err"
  exec 9>"$dev"
  tell start >&9
else
  exec 9>/dev/null
fi
if [ -n "$in" ]; then
  port "$in"
  exec 7<"$dev"
else
  exec 7</dev/null
fi
tell start >&8
[ -z "$dir" ] || cd "$dir" 2>/dev/null || fail "directory $dir"
"""

_WITH_TERMINAL: Final = (
    QUOTED
    + r"""  rows=${size% *} columns=${size#* }
  inside="stty sane rows $rows cols $columns 2>/dev/null; tty=\$(tty); printf '\\001%s tty %s;' $token \"\$tty\" >&8"
  [ -z "$user" ] || inside="$inside; chown $user \"\$tty\" 2>/dev/null"
  inside="$inside; exec 8>&- 9>&-; exec$quoted"
  if command -v script >/dev/null; then
    SHELL=/bin/sh script -qefc "$inside" /dev/null <&7 >&8 2>&1 7<&-
  elif command -v python3 >/dev/null; then
    python3 -c 'import os,pty,sys
os.set_inheritable(8, True)
code = os.waitstatus_to_exitcode(pty.spawn(["/bin/sh", "-c", sys.argv[1]]))
sys.exit(code if code >= 0 else 128 - code)' "$inside" <&7 >&8 2>&1 7<&-
  else
    fail "tool script"
  fi
  tell "exit $?" >&8
"""
)

_WITHOUT_TERMINAL: Final = r"""  if [ -n "$in" ]; then
    feed() {
      cat <&7 7<&- 8>&- 9>&- 5>&- 2>/dev/null | {
        (exec "$@" 7<&- 2>&1 >&5 5>&- 8>&- 9>&-)
        tell "exit $?" >&8
      }
    }
  else
    feed() {
      (exec "$@" <&7 7<&- 2>&1 >&5 5>&- 8>&- 9>&-)
      tell "exit $?" >&8
    }
  fi
  command -v setsid >/dev/null || fail "tool setsid"
  {
    feed setsid "$@" | cat >&9 5>&- 7<&- 8>&- 9>&-
  } 5>&1 | cat >&8 7<&- 8>&- 9>&-
  tell end >&9
"""

# All that a command's script may have.
RUN: Final = _PORTS + AS_USER + _WITH_TERMINAL + _WITHOUT_TERMINAL

# Arguments: what to kill, and the tag to find in command lines. "all": everything that the run scripts with that tag
# started, also in other sessions. "relays": only the scripts and their cats; processes that the command left behind
# survive.
KILL: Final = r"""
what=$1 tag=$2 self=$$
read -r line </proc/$$/stat
set -- ${line##*) }
session=$4
doomed=" "
for found in $(grep -l -F -e "$tag" /proc/[0-9]*/cmdline 2>/dev/null); do
  found=${found#/proc/}
  found=${found%/cmdline}
  [ "$found" = "$self" ] || doomed="$doomed$found "
done
[ "$doomed" != " " ] || exit 0
spread() {
  while :; do
    before=$doomed
    for stat in /proc/[0-9]*/stat; do
      { read -r line <"$stat"; } 2>/dev/null || continue
      pid=${line%% *}
      set -- ${line##*) }
      case $doomed in *" $pid "*) continue ;; esac
      if [ "$what" = all ]; then
        case $doomed in *" $2 "* | *" $4 "*) doomed="$doomed$pid " ;; esac
      elif [ "$4" = "$session" ]; then
        case $doomed in *" $2 "*) doomed="$doomed$pid " ;; esac
      fi
    done
    [ "$before" != "$doomed" ] || break
  done
}
spread
kill -9 $doomed 2>/dev/null
spread
kill -9 $doomed 2>/dev/null
exit 0
"""

# Arguments: numbers of up to eight ports that were just plugged in. Waits for them. The exit code has a bit for each
# port that did not appear, for example because the guest has no memory for it.
WAIT_FOR_PORTS: Final = r"""
for try in 1 2 3 4 5 6 7 8 9; do
  missing=0 bit=1
  for number; do
    name=
    for sys in /sys/class/virtio-ports/vport*p$((number + 2)); do
      { read -r name <"$sys/name"; } 2>/dev/null
    done
    [ "$name" = "virtshim.exec.$number" ] || missing=$((missing + bit))
    bit=$((bit * 2))
  done
  [ $missing != 0 ] || exit 0
  sleep 0.$try 2>/dev/null || sleep 1
done
exit $missing
"""

# Arguments: terminal, rows, columns.
RESIZE: Final = 'stty rows "$2" cols "$3" <"$1"'

# The same for the console, which is nobody's terminal; opening it must not wait for a carrier.
RESIZE_CONSOLE: Final = 'stty -F "$1" rows "$2" cols "$3"'

# Runs the first of these that the guest has.
REBOOT: Final = 'for way in "systemctl reboot" "shutdown -r now" reboot; do $way 2>/dev/null && exit 0; done; exit 1'


def limits(user: RunAs) -> str:
    """setpriv's arguments for what the command must not be able to gain. Root in a guest has every capability, so
    adding one means not removing it."""
    words = ["--no-new-privs"] if user.no_new_privs else []
    single = [name for name in user.dropped if name != "all"]
    taken = [f"-{name}" for name in single]
    if "all" in user.dropped:
        taken = ["-all", *(f"+{name}" for name in user.added if name not in ("all", *single))]
    if taken:
        words += [f"--bounding-set={','.join(taken)}", f"--inh-caps={','.join(taken)}"]
    return " ".join(words)


def tag(token: str = "") -> str:
    """The mark in the command lines of that session's shells; without a token, of all sessions' shells."""
    return f"virtshim-exec {token}"


def run_script(token: str, *, as_user: bool, tty: bool) -> str:
    """`as_user`: whether the command needs another user, groups or limits. A script has only what its command needs, because an
    emulated guest's agent takes milliseconds to read 4 KiB."""
    become = AS_USER if as_user else ""
    return f"\n# {tag(token)}\n{_PORTS}{become}{_WITH_TERMINAL if tty else _WITHOUT_TERMINAL}tell end >&8\n"
