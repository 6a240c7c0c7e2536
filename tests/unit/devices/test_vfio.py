"""Both programs recognise VFIO drivers by the same names."""

from __future__ import annotations

import pytest

from tapmanager.links.network_plan import is_vfio
from virtshim.devices.values import VFIO_PCI, is_vfio_driver

# The kernel's own, and those of vendors.
VFIO = [
    VFIO_PCI,
    "mlx5_vfio_pci",
    "hisi_acc_vfio_pci",
    "hisi-acc-vfio-pci",
    "pds-vfio-pci",
    "virtio-vfio-pci",
    "virtio_vfio_pci",
    "nvgrace-gpu-vfio-pci",
    "nvgrace_gpu_vfio_pci",
    "qat_vfio_pci",
    "xe-vfio-pci",
]


@pytest.mark.parametrize("driver", VFIO)
def test_a_vfio_driver_is_recognised_by_its_name(driver: str) -> None:
    assert is_vfio_driver(driver)
    assert is_vfio(driver)


@pytest.mark.parametrize("driver", ["", "iavf", "pci-stub", "virtio-pci", "uio_pci_generic", "notvfio", "vfiox-pci"])
def test_any_other_driver_is_not(driver: str) -> None:
    assert not is_vfio_driver(driver)
    assert not is_vfio(driver)
