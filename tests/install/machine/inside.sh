#!/bin/sh
# What the machine is told besides its packages. Run by mmdebstrap, for ./build.sh.
#
#   inside.sh before ROOT   before the packages are installed
#   inside.sh after ROOT    after
set -eu
root=$2

put() { mkdir -p "$(dirname "$root/$1")" && cat > "$root/$1"; }

before() {
  put etc/initramfs-tools/conf.d/virtual <<END
MODULES=list
COMPRESS=lz4
RESUME=none
END
  put etc/initramfs-tools/modules <<END
virtio_pci
virtio_blk
ext4
END
  # As on a build machine: nothing starts while packages are installed.
  printf '#!/bin/sh\nexit 101\n' | put usr/sbin/policy-rc.d
  chmod 0755 "$root/usr/sbin/policy-rc.d"
}

after() {
  rm -f "$root/usr/sbin/policy-rc.d"
  chroot "$root" apt-get autoclean -qq
  # apt has no lists: it has to do with what is installed and with the package that it is given.
  rm -rf "$root"/var/lib/apt/lists/*
  mkdir -p "$root/var/lib/apt/lists/partial" "$root/var/cache/apt/archives/partial"
  : > "$root/etc/apt/sources.list"
  echo "LABEL=root / ext4 rw,discard,errors=remount-ro 0 0" | put etc/fstab
  echo node | put etc/hostname
  printf '127.0.0.1 localhost node\n' | put etc/hosts
  : > "$root/etc/machine-id"
  rm -f "$root/etc/resolv.conf"
  : > "$root/etc/resolv.conf"
  # Debian's unit waits for an event that udev may take for another's, when the port's name comes later than the port.
  put etc/systemd/system/commands.service <<END
[Unit]
Description=Commands of the test
[Service]
ExecStart=/bin/sh -c 'until [ -e /dev/vport*p1 ]; do sleep 0.2; done; exec qemu-ga --method virtio-serial --path /dev/vport*p1'
Restart=always
[Install]
WantedBy=multi-user.target
END
  chroot "$root" systemctl mask --quiet qemu-guest-agent
  chroot "$root" systemctl enable --quiet commands
  # The journal is read after a reboot.
  mkdir -p "$root/var/log/journal"
  # What looks after a machine over days takes time under emulation.
  chroot "$root" systemctl mask --quiet \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    man-db.timer logrotate.timer getty@tty1.service systemd-binfmt.service proc-sys-fs-binfmt_misc.automount
}

case $1 in
  before) before ;;
  after) after ;;
esac
