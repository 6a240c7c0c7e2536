# What the machine does once it has a root file system, as PID 1: prepares itself as a node's init would, runs the story, ends.
# The story's report goes to the second serial port, all else to the first.
project=$(cd "$(dirname "$0")/../../.." && pwd)
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1
exec < /dev/null > /dev/console 2>&1
mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
mkdir -p /run/netns
mount --bind --make-shared /run/netns /run/netns
modprobe -a vfio-pci tun bridge veth loop
# As udev would.
modprobe -q -a $(sort -u /sys/bus/pci/devices/*/modalias /sys/bus/virtio/devices/*/modalias)
stty -F /dev/ttyS1 raw
# No VM here is one of 32 bits, and libvirt would ask that QEMU what it can.
rm -f /usr/bin/qemu-system-i386
for word in $(cat /proc/cmdline); do
  case $word in
    chapters=*) chapters=${word#chapters=} ;;
    full) full=full ;;
  esac
done
cd "$project" && .venv/bin/python tests/vfio/story.py /dev/ttyS1 "$chapters" $full
busybox poweroff -f
