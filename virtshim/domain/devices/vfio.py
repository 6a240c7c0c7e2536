"""Drivers with which VFIO takes a PCI function. Pure."""

from __future__ import annotations

from typing import Final

# The one that takes any function.
VFIO_PCI: Final = "vfio-pci"


def is_vfio_driver(driver: str) -> bool:
    """vfio-pci, and the drivers of one vendor each that add what its devices need: mlx5_vfio_pci, hisi-acc-vfio-pci. tapmanager,
    which is a program of its own, decides in the same way."""
    return "vfio" in driver.replace("-", "_").split("_")
