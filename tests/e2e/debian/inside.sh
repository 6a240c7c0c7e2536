#!/bin/sh
# What the image is told besides its packages. Run by mmdebstrap, for ./build.sh.
#
#   inside.sh before ROOT            before the packages are installed
#   inside.sh after ROOT ROOT_UUID   after
set -eu
root=$2

# What the small guest's kernel is told too: what only takes time under emulation.
quick="loglevel=6 mitigations=off nokaslr audit=0 tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on"

put() { mkdir -p "$(dirname "$root/$1")" && cat > "$root/$1"; }

before() {
  # An initramfs for the disks that a VM can have, not for all machines: much less to read and to unpack under emulation.
  put etc/initramfs-tools/conf.d/virtual <<END
MODULES=list
COMPRESS=lz4
RESUME=none
END
  put etc/initramfs-tools/modules <<END
virtio_pci
virtio_blk
virtio_scsi
sd_mod
ext4
END
}

after() {
  echo "UUID=$1 / ext4 rw,discard,errors=remount-ro,x-systemd.growfs 0 0" | put etc/fstab
  grub=$root/boot/grub
  mkdir -p "$grub/i386-pc"
  (cd "$root/usr/lib/grub/i386-pc" && cp ./*.mod ./*.lst boot.img "$grub/i386-pc/")
  chroot "$root" grub-mkimage --format i386-pc --output /boot/grub/i386-pc/core.img --prefix '(hd0,gpt1)/boot/grub' \
    biosdisk part_gpt ext2
  put boot/grub/grub.cfg <<END
set timeout=0
if [ "\$grub_platform" = pc ]; then # UEFI's console is the serial port too
  serial --unit=0 --speed=115200
  terminal_input console serial
  terminal_output console serial
fi
menuentry Debian {
  linux /vmlinuz root=UUID=$1 ro console=tty0 console=ttyS0,115200 $quick
  initrd /initrd.img
}
END

  # The cache keeps what is newest.
  chroot "$root" apt-get autoclean -qq

  # Each VM its own.
  rm -f "$root"/etc/ssh/ssh_host_*_key* "$root/etc/hostname" "$root/etc/resolv.conf" "$root/var/lib/dbus/machine-id"
  : > "$root/etc/machine-id"
  ln -s ../run/systemd/resolve/stub-resolv.conf "$root/etc/resolv.conf"
  chroot "$root" systemctl enable --quiet systemd-networkd systemd-resolved qemu-guest-agent

  # Each process costs a tenth of a second and more under emulation. What is left out here looks after a machine over days, or
  # looks for hardware and file systems that a VM of a test does not have.
  chroot "$root" systemctl mask --quiet \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    getty@tty1.service systemd-update-utmp.service systemd-update-utmp-runlevel.service netplan-ovs-cleanup.service \
    modprobe@dm_mod.service modprobe@drm.service modprobe@efi_pstore.service modprobe@loop.service systemd-pstore.service \
    dev-hugepages.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount \
    proc-sys-fs-binfmt_misc.automount systemd-binfmt.service
  put etc/modprobe.d/virtual.conf <<END
blacklist kvm_amd
blacklist kvm_intel
blacklist powernow_k8
END

  # As in Debian's own images.
  echo LANG=C.UTF-8 | put etc/default/locale
  # RSA keys take half a minute under emulation, and looking at GRUB's package five seconds.
  put etc/cloud/cloud.cfg.d/10_image.cfg <<END
manage_etc_hosts: true
ssh_genkeytypes: [ed25519]
grub_dpkg: {enabled: false}
END
}

case $1 in
  before) before ;;
  after) after "$3" ;;
esac
