"""A local user who reads the definitions of VMs on libvirt's read-only socket learns only names from the pod."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.world import World, container_config, sandbox_config

from virtshim.model.container import RunAs
from virtshim.vm import domain_xml
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType

pytestmark = pytest.mark.hostile

PROFILE = NodeProfile("node", DomainType.KVM, "/usr/libexec/virtshim/vmwrapper", "/usr/bin/qemu", Cgroups.V2)
SECRET = "correct-horse"
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIHUH1zzlzhSHrPmrF9JCvKRBPMUKQF3OaUXcSPxUFvRz"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_definition_contains_only_names_from_the_pod(world: World) -> None:
    world.pull()
    annotations = {
        "VirtletCloudInitUserData": f"password: {SECRET}\nchpasswd: {{expire: false}}\n",
        "VirtletSSHKeys": f"ssh-ed25519 {KEY} {SECRET}",
        "kubectl.kubernetes.io/last-applied-configuration": f'{{"token": "{SECRET}"}}',
    }
    sandbox = world.run(config=sandbox_config(annotations=annotations, labels={"label": SECRET}))
    config = container_config(
        command=("/bin/serve",),
        args=(f"--token={SECRET}",),
        envs=(("TOKEN", SECRET.encode()),),
        working_dir=f"/{SECRET}",
        annotations={"note": SECRET},
        user=RunAs(user=SECRET),
    )
    container = world.create(sandbox, config=config)
    spec = world.outside.vms.domains[world.domain(container)].spec
    assert spec is not None
    assert spec.title == "default/web/vm"
    assert SECRET not in domain_xml.build(spec, PROFILE)
    assert SECRET in world.outside.copies.read(container), "what is rebuilt from is elsewhere"
