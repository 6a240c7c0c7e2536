#!/bin/sh
# Runs a command apart from all else on this machine: mounts, processes, network and IPC of its own, and nothing in /var/tmp,
# /run/netns and /run/virtshim. So lanes of tests neither see nor disturb each other, and what each leaves is judged by
# itself.
#
# All of it, files in /var/tmp too, is gone when the command has ended, or this shell, however it did: setpriv has `unshare`
# killed with this shell, --kill-child the first process of the namespaces with `unshare`, and that takes all others along.
#
#   apart.sh COMMAND ...
setpriv --pdeathsig KILL unshare --mount --pid --net --ipc --kill-child --mount-proc sh -euc '
cgroups=$(mktemp -d)
mount --rbind /sys/fs/cgroup "$cgroups"
mount -t sysfs sysfs /sys  # one that shows the links of this namespace
mount --rbind "$cgroups" /sys/fs/cgroup
umount -l "$cgroups"
rmdir "$cgroups"
mkdir -p /run/netns /run/virtshim
mount -t tmpfs -o mode=755 apart /run/netns
mount -t tmpfs -o mode=755 apart /run/virtshim
mount -t tmpfs -o mode=1777 apart /var/tmp
ip link set lo up
status=0
"$@" || status=$?
exit $status
' apart "$@"
exit $?
