"""A real Debian runs as a pod, with systemd, udev, cloud-init with netplan, the QEMU guest agent and OpenSSH. So the
programs that users have read what virtshim writes for guests.

One VM serves all tests. The last but one stops it, and the last boots its disk once more. `make test` boots it once, by
BIOS; `--all` boots it with UEFI, secure boot and a TPM."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from cluster_networks import leases, networks
from fakes.calico_plugin import GATEWAY, GATEWAY_6
from fakes.kubelet_writer import WrittenVolume
from fakes.spdy import close_all, spdy
from guest import ping
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_until
from running_vm import RunningVm

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.seed.sources import IGNITION_FIRMWARE_NAMES

# Under emulation, and beside other tests, it boots for minutes.
PATIENCE = 900
pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.debian, pytest.mark.timeout(2 * PATIENCE)]

GIB = 1 << 30
# The guest's networks have gateways outside the pod's subnets, as in most clusters.
CALICO = ("10.90.20.2/32", "fd00:90:20::2/128")
PTP = "10.90.21"
USER_DATA = """
write_files:
- path: /etc/from-user-data
  content: written
runcmd:
- echo ran on $(hostname) >> /var/lib/boots
- cp /srv/claim/text /var/lib/at-runcmd
- test -s /etc/texts/text && touch /var/lib/texts-were-there
"""
# Ignition's configuration. The test runs Ignition by hand, because this guest's first boot is cloud-init's.
IGNITION = {
    "ignition": {"version": "3.3.0"},
    "storage": {"files": [{"path": "/etc/motd", "contents": {"source": "data:,hi"}}]},
}
ENGINE = Path("/usr/lib/dracut/modules.d/30ignition/ignition")
JOB = """
until [ -e /run/cloud-init/result.json ]; do sleep 0.5; done
id -un; pwd; echo $GREETING; hostname
cat /var/lib/cloud/data/instance-id
md5sum < /etc/ssh/ssh_host_ed25519_key.pub
ip -4 -oneline address show dev eth0 | awk '{print $4}'
cat /etc/cloud/environment
wc -l < /var/lib/boots
df --output=size -B1 / | tail -n 1
echo trouble >&2
exit 3
"""


class Debian:
    """A pod with a persistent root disk, and the container that currently runs on it."""

    def __init__(
        self, cri: PodClient, node: Node, image: str, key: Path, claim: Path, machine: Mapping[str, str]
    ) -> None:
        """`claim`: a directory that the pod has as a volume. `machine`: annotations about firmware and devices."""
        self.cri = cri
        self.identity: list[str] = []
        self._claim = claim
        self._image = cri.pull(image)
        public = key.with_suffix(".pub").read_text()
        annotations = {
            "VirtletRootVolumeSize": "3Gi",
            "VirtletSSHKeys": public,
            "VirtletCloudInitUserData": USER_DATA,
            "virtshim.io/root-disk": "pod",
            "virtshim.io/forward": "agent",
            "virtshim.io/ignition": json.dumps(IGNITION),
            **machine,
        }
        self._config = pod_config("debian-pod", f"{node.directory}/logs/debian", annotations=annotations)
        self.texts = WrittenVolume(Path(node.directory, "kubelet"), self._config.metadata.uid, "secret", "texts")
        self.texts.write({"text": b"the words of a secret\n"}, mode=0o440, group=1000)
        self.pod = cri.run_pod(self._config)
        self.address = cri.pod_ip(self.pod)
        self.containers: list[str] = []

    def begin(self, *command: str, greeting: bytes = b"hello there") -> str:
        """Starts another container on the pod's disk; returns its id."""
        wanted = container_config(self._image, memory=512 << 20, attempt=len(self.containers))
        wanted.linux.security_context.run_as_user.value = 1000  # whom cloud-init makes
        wanted.working_dir = "/var/lib/cloud"
        wanted.envs.add(key="GREETING", value=greeting)
        wanted.mounts.add(container_path="/srv/claim", host_path=str(self._claim))
        wanted.command.extend(command)
        wanted.mounts.add(container_path="/etc/texts", host_path=str(self.texts.path), readonly=True)
        self.containers.append(self.cri.create(self.pod, wanted, self._config))
        self.cri.start(self.containers[-1])
        return self.containers[-1]

    def move_to_a_new_sandbox(self) -> None:
        """Moves to a new sandbox, as after a reboot of the node. The old sandbox is removed last, because the disk is
        removed with the pod's last sandbox."""
        old = self.pod
        self.cri.stop_pod(old)
        self._config.metadata.attempt += 1
        self.pod = self.cri.run_pod(self._config)
        self.address = self.cri.pod_ip(self.pod)
        self.cri.remove_pod(old)

    def shut_down(self) -> str:
        """Shuts down by the power button; returns the ended container."""
        ended = self.containers[-1]
        # The lasting parts of an instance: its id, its host key, its first commands.
        self.identity = self.says(
            "cat /var/lib/cloud/data/instance-id; md5sum < /etc/ssh/ssh_host_ed25519_key.pub; wc -l < /var/lib/boots"
        ).splitlines()
        self.cri.stop(ended, PATIENCE)
        return ended

    def comes_up(self) -> None:
        """Waits until cloud-init has finished."""
        done = self.run("until [ -e /run/cloud-init/result.json ]; do sleep 0.5; done", PATIENCE)
        assert done.exit_code == 0, done.stderr

    def run(self, script: str, timeout: int = 0) -> pb.ExecSyncResponse:
        return self.cri.exec_sync(self.containers[-1], "sh", "-c", script, timeout=timeout)

    def says(self, script: str) -> str:
        done = self.run(script)
        assert done.exit_code == 0, (done.stdout, done.stderr)
        return done.stdout.decode().strip()

    def is_running(self) -> bool:
        return bool(self.containers) and self.cri.status(self.containers[-1]).state == pb.CONTAINER_RUNNING

    def log_of(self, container: str) -> str:
        return "\n".join(log_lines(self.cri.status(container).log_path))


@pytest.fixture(scope="module")
def ssh_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = tmp_path_factory.mktemp("ssh") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


@pytest.fixture(scope="module")
def claim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("claim")
    directory.chmod(0o755)
    (directory / "text").write_text("from the node\n")
    return directory


# shim, signed by Microsoft; GRUB and kernel, signed by Debian.
SIGNED = {"virtshim.io/firmware": "uefi-secure", "virtshim.io/tpm": "true"}


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Mapping[str, str]:
    return SIGNED if request.config.getoption("--all") else {}


@pytest.fixture(scope="module")
def debian_pod(
    node: Node,
    running_vm: RunningVm,
    image_url: str,
    ssh_key: Path,
    claim: Path,
    machine: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Debian]:
    running_vm.end()
    folder = tmp_path_factory.mktemp("networks")
    calico = {"name": "calico", "type": "calico", "addresses": CALICO}
    ptp = {"name": "ptp", "type": "ptp", "mtu": 1400, "ipam": leases(folder, f"{PTP}.0/24")}
    with PodClient(node.socket) as cri:
        with networks(node, folder, calico, ptp):
            made = Debian(cri, node, f"{image_url}/debian.qcow2", ssh_key, claim, machine)
        yield made
        cri.remove_pod(made.pod)


@pytest.fixture
def debian(debian_pod: Debian) -> Debian:
    """A running Debian in which cloud-init has finished."""
    if not debian_pod.is_running():
        debian_pod.begin()
    debian_pod.comes_up()
    return debian_pod


@pytest.fixture
def shut_down(debian_pod: Debian) -> Debian:
    """The Debian after a shutdown by its power button."""
    if not debian_pod.identity:
        debian_pod.begin()
        debian_pod.comes_up()
        debian_pod.shut_down()
    return debian_pod


def test_the_root_disk_is_vda_and_has_grown_to_the_requested_size(debian: Debian):
    assert debian.says("findmnt --noheadings --output SOURCE /") == "/dev/vda1"
    assert int(debian.says("cat /sys/class/block/vda/size")) * 512 == 3 * GIB
    assert int(debian.says("df --output=size -B1 / | tail -n 1")) > 2.8 * GIB, "partition and file system too"
    assert debian.says("ls /dev/disk/by-id | grep virtio-root").split() == [
        "virtio-root",
        *(f"virtio-root-part{number}" for number in (1, 14, 15)),
    ]


@pytest.mark.full
def test_uefi_starts_only_signed_programs_and_there_is_a_tpm(debian: Debian):
    """The firmware has Microsoft's keys and shim has Debian's; GRUB and the kernel are Debian's own."""
    debian.says("test -d /sys/firmware/efi && test -c /dev/tpm0")
    assert debian.says("cat /sys/class/tpm/tpm0/tpm_version_major") == "2"
    secure_boot = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    assert debian.says(f"tail -c 1 {secure_boot} | od -An -tu1") == "1"
    assert "[integrity]" in debian.says("cat /sys/kernel/security/lockdown"), "the kernel knows it, too"


def test_cloud_init_finds_the_seed_and_reports_no_fault(debian: Debian):
    result = json.loads(debian.says("cat /run/cloud-init/result.json"))["v1"]
    assert result["errors"] == []
    assert result["datasource"].startswith("DataSourceNoCloud [seed=/dev/vdb]")
    assert debian.says("cat /run/cloud-init/status.json | grep -c Warning || true") == "0"
    assert debian.says("sudo grep -h WARNING /var/log/cloud-init.log || true") == ""


def test_hostname_user_data_and_commands_come_from_the_pod(debian: Debian):
    assert debian.says("hostname; cat /etc/hostname /etc/from-user-data").split() == [
        "debian-pod",
        "debian-pod",
        "written",
    ]
    assert debian.says("cat /var/lib/boots").splitlines()[-1] == "ran on debian-pod"


def test_ignition_finds_its_configuration_in_the_firmware(debian: Debian, claim: Path):
    assert ENGINE.exists(), "needs Debian's package ignition; run make setup"
    debian.says("sudo modprobe qemu_fw_cfg")
    for name in IGNITION_FIRMWARE_NAMES:
        assert json.loads(debian.says(f"sudo cat /sys/firmware/qemu_fw_cfg/by_name/{name}/raw")) == IGNITION
    shutil.copy(ENGINE, claim / "ignition")
    debian.says(
        "sudo /srv/claim/ignition --platform=qemu --stage=fetch-offline --root=/var/tmp/root --neednet=/var/tmp/neednet"
        " --config-cache=/var/tmp/ignition.json --log-to-stdout"
    )
    read = json.loads(debian.says("sudo cat /var/tmp/ignition.json"))
    assert [(file["path"], file["contents"]["source"]) for file in read["storage"]["files"]] == [
        ("/etc/motd", "data:,hi")
    ]


@pytest.mark.volumes
def test_volumes_are_mounted_before_cloud_inits_first_runcmd(debian: Debian, claim: Path):
    assert debian.says("cat /var/lib/at-runcmd") == "from the node"
    assert "virtiofs" in debian.says("findmnt --noheadings --output FSTYPE /srv/claim")
    assert (
        debian.says("sudo install -o debian -m 0640 /dev/null /srv/claim/mine; stat -c %U:%a /srv/claim/mine")
        == "debian:640"
    )
    assert (claim / "mine").stat().st_uid == 1000


def test_a_secret_exists_before_runcmd_is_updated_and_is_on_no_disk(debian: Debian):
    assert debian.says("ls /var/lib/texts-were-there")
    assert debian.says("cat /etc/texts/text; stat -L -c '%u %g %a' /etc/texts/text") == (
        "the words of a secret\n0 1000 440"
    )
    # Brackets: the journal has the words of this command.
    assert (
        debian.says("sudo grep -rl 'words of a[ ]secret' /etc /var /run/cloud-init | grep -v ^/etc/texts/ || true")
        == ""
    )
    debian.texts.write({"text": b"other words\n", "more": b""}, mode=0o440, group=1000)
    wait_until(
        lambda: debian.says("cat /etc/texts/text; ls /etc/texts") == "other words\nmore\ntext", 120, "the new ones"
    )


def test_netplan_gives_each_nic_the_pods_addresses_routes_and_name_servers(debian: Debian):
    assert [addresses_of(debian, nic) for nic in ("eth0", "net1")] == [set(CALICO), {f"{PTP}.2/32"}]
    assert [gateways_of(debian, family) for family in "46"] == [[GATEWAY], [GATEWAY_6]]
    resolver = debian.says("cat /run/systemd/resolve/resolv.conf").splitlines()
    assert {"nameserver 10.96.0.10", "search default.svc.cluster.local"} <= set(resolver)
    assert debian.says("cat /sys/class/net/net1/mtu") == "1400"
    assert debian.says("networkctl --no-pager status eth0 | grep -c 'State: routable' || true") == "1"


def test_guest_and_node_reach_each_other_where_gateways_are_in_no_subnet(debian: Debian):
    assert [ping(address.partition("/")[0]) for address in (*CALICO, f"{PTP}.2/32")] == [True, True, True]
    for gateway in (GATEWAY, f"{GATEWAY_6}%eth0", f"{PTP}.1"):
        assert "1 received" in debian.says(f"sudo ping -c 1 -W 10 {gateway}")


BY_ASKING = """
rm -f /run/systemd/network/05-asking.network
if [ "$1" = asking ]; then
  printf "[Match]\\nName=eth0\\n[Network]\\nDHCP=yes\\nIPv6AcceptRA=yes\\n" > /run/systemd/network/05-asking.network
fi
ip address flush dev eth0 scope global
networkctl reload
networkctl reconfigure eth0
"""


@pytest.mark.full  # the guest's own network daemon asks for as long as emulation makes it wait
def test_networkd_gets_the_same_addresses_by_dhcp_without_cloud_init(debian: Debian):
    def has_all() -> bool:
        return addresses_of(debian, "eth0") == set(CALICO) and gateways_of(debian, "6") == [GATEWAY_6]

    def configure(how: str) -> None:
        debian.says(f"sudo sh -ec '{BY_ASKING}' sh {how}")

    configure("asking")
    try:
        wait_until(has_all, 120, "addresses by DHCP and DHCPv6, and a router")
        assert "proto ra" in debian.says("ip -6 route show default")
        assert [gateways_of(debian, "4"), ping(CALICO[1].partition("/")[0])] == [[GATEWAY], True]
    finally:
        configure("as-before")
    wait_until(has_all, 120, "what netplan says")


def addresses_of(debian: Debian, nic: str) -> set[str]:
    (told,) = json.loads(debian.says(f"ip -json address show dev {nic}"))
    return {f"{one['local']}/{one['prefixlen']}" for one in told["addr_info"] if one["scope"] == "global"}


def gateways_of(debian: Debian, family: str) -> list[str]:
    return [route["gateway"] for route in json.loads(debian.says(f"ip -json -{family} route show default"))]


def test_the_pods_ssh_key_allows_a_login_over_the_network(debian: Debian, ssh_key: Path):
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes", "ConnectTimeout=60"]
    done = subprocess.run(
        ["ssh", "-i", ssh_key, *(word for one in options for word in ("-o", one)), f"debian@{debian.address}",
         "hostname; sudo --non-interactive id -un; exit 7"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (7, ["debian-pod", "root"]), done.stderr


def test_commands_run_with_the_containers_user_directory_and_environment(debian: Debian):
    assert debian.says("id -un; id -u; pwd; echo $HOME; echo $GREETING").splitlines() == [
        "debian", "1000", "/var/lib/cloud", "/home/debian", "hello there",
    ]  # fmt: skip
    assert "sudo" in debian.says("id -Gn").split(), "the groups that /etc/group gives the user"
    done = debian.run("echo out; echo err >&2; exit 9")
    assert (done.exit_code, done.stdout, done.stderr) == (9, b"out\n", b"err\n")
    assert debian.run("kill -9 $$").exit_code == 137
    assert debian.cri.exec_sync(debian.containers[-1], "no-such-program").exit_code == 127
    assert len(debian.run("head -c 3000000 /dev/zero").stdout) == 3_000_000


def test_the_terminal_of_a_command_belongs_to_its_user(debian: Debian):
    words = ["sh", "-c", "stty size; test -O $(tty) && echo mine; read word; echo said $word; exit 4"]
    request = pb.ExecRequest(container_id=debian.containers[-1], cmd=words, tty=True, stdin=True, stdout=True)
    client = spdy(debian.cri.runtime.Exec(request, timeout=60).url)
    streams = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout", "resize")}
    client.until(lambda: client.replied >= set(streams.values()))
    client.write(streams["stdin"], b"hello\r")
    client.until(lambda: b"said hello\r\n" in client.received[streams["stdout"]])
    assert b"mine\r\n" in client.received[streams["stdout"]]
    assert b'"4"' in client.read_all(streams["error"])
    close_all()


def test_port_forward_reaches_a_service_on_the_guests_loopback(debian: Debian):
    """A program of Debian dials the port."""
    request = pb.PortForwardRequest(pod_sandbox_id=debian.pod)
    client = spdy(debian.cri.runtime.PortForward(request, timeout=60).url, "portforward.k8s.io")
    client.sock.settimeout(PATIENCE)  # a program of the guest is started for it
    client.open(streamtype="error", fin=True, port="22", requestid="0")
    data = client.open(streamtype="data", port="22", requestid="0")
    client.until(lambda: b"SSH-2.0-OpenSSH" in client.received[data])
    close_all()


def test_the_console_is_the_containers_log(debian: Debian):
    log = debian.log_of(debian.containers[0])
    assert "Linux version" in log
    assert "Welcome to" in log
    assert "debian-pod login:" in log


def test_the_guest_agent_reports_system_and_hostname(debian: Debian):
    request = pb.ContainerStatusRequest(container_id=debian.containers[-1], verbose=True)
    told = json.loads(debian.cri.runtime.ContainerStatus(request, timeout=60).info["guestInfo"])
    assert told["system"]["pretty-name"] == "Debian GNU/Linux 12 (bookworm)"
    assert told["hostname"] == "debian-pod"


def test_an_operator_freezes_and_thaws_the_guests_file_systems(debian: Debian, node: Node):
    def command(name: str, *words: str) -> str:
        line = [*VIRTSHIM, name, "--socket", node.socket, *words, "debian-pod"]
        return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout

    assert "frozen, for 300 s at most" in command("freeze", "--seconds", "300")
    with pytest.raises(grpc.RpcError, match="virtshim thaw"):
        debian.run("true")
    assert "thawed" in command("thaw")
    assert debian.says("touch /var/tmp/after && echo written") == "written"


@pytest.mark.full
@pytest.mark.volumes
def test_volumes_are_mounted_again_after_the_guest_reboots(debian: Debian):
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = debian.says(boot)
    debian.run("sudo systemd-run --on-active=1 systemctl reboot")

    def has_rebooted() -> bool:
        try:
            now = debian.run(boot, 60)
        except grpc.RpcError:  # nobody answers there just now
            return False
        return now.exit_code == 0 and now.stdout.decode().strip() != before

    wait_until(has_rebooted, PATIENCE, "it has rebooted")
    debian.comes_up()
    assert debian.says("cat /srv/claim/text") == "from the node"


def test_systemd_obeys_the_power_button(debian: Debian):
    ended = debian.shut_down()
    status = debian.cri.status(ended)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 143, "Error")
    assert "Reached target" in (log := debian.log_of(ended))
    assert "Power down" in log, "systemd went through all of its shut-down"


@pytest.mark.full
def test_the_disk_is_the_same_instance_in_a_new_sandbox(shut_down: Debian):
    """Host keys and first-boot commands belong to the instance; addresses and the container's variables belong to the
    sandbox."""
    *identity, commands = shut_down.identity
    assert commands == "1"
    address = shut_down.address
    shut_down.move_to_a_new_sandbox()
    assert shut_down.address != address
    second = shut_down.begin("sh", "-c", JOB, greeting=b"hello again")
    wait_until(lambda: not shut_down.is_running(), PATIENCE, "the container's command has ended")
    status = shut_down.cri.status(second)
    assert (status.exit_code, status.reason) == (3, "Error")
    *said, size = [line for line in shut_down.log_of(second).splitlines() if line != "trouble"]
    assert said[:4] == ["debian", "/var/lib/cloud", "hello again", "debian-pod"]
    assert said[4:6] == identity
    assert said[6].partition("/")[0] == shut_down.address
    assert said[7] == "GREETING=hello again"
    assert said[8] == "1", "what is done once was not done again"
    assert int(size) > 2.8 * GIB
    shut_down.cri.remove_pod(shut_down.pod)  # it is this test's
