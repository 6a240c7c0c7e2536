"""Pausing VMs and saving their memory: implements `virtshim.vm.ports.VmPausing`."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final, cast
from xml.etree.ElementTree import Element, SubElement

import libvirt
import structlog

from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, NotFound, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.text import escaped
from virtshim.model.vm import Power
from virtshim.vm.bounded import BoundedCalls
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import SECRETS, NodeProfile
from virtshim.vm.elements.text import absolute_path
from virtshim.vm.errors import code_of, message_of
from virtshim.vm.own_domains import OwnDomains
from virtshim.vm.power import power_of
from virtshim.vm.xml_text import parsed, text_of

log = structlog.get_logger(__name__)

_ENDED: Final = frozenset({libvirt.VIR_ERR_OPERATION_ABORTED, libvirt.VIR_ERR_OPERATION_FAILED})
# Seconds between attempts to abort: when the time is over, the job may not have begun yet.
_AGAIN: Final = 0.2
# More than a VM has; QEMU may be a hostile one that knows all NICs.
_MOST_NICS: Final = 64


class LibvirtPausing(OwnDomains):
    def __init__(self, connection: Connection, profile: NodeProfile, limit: float = 10.0) -> None:
        """`limit`: seconds for QEMU to answer its monitor."""
        super().__init__(connection, profile)
        self._limit = limit
        self._pausing = BoundedCalls("pause")
        self._resuming = BoundedCalls("resume")
        self._linking = BoundedCalls("set the links of")
        self._asking = BoundedCalls("ask for disk errors of")

    def pause(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        """If the pause takes effect after the time limit, it is undone."""
        is_paused, given_up = threading.Event(), threading.Event()

        def suspend() -> None:
            with self._using(domain, "pause", container) as found:
                if power_of(found).power is not Power.RUNNING:
                    raise WrongState(f"VM {domain} is not running: it cannot be paused")
                found.suspend()
            is_paused.set()
            if given_up.is_set():
                self._resume(domain, container)

        try:
            self._pausing.call(domain, suspend, self._limit)
        except DeadlineExceeded:
            given_up.set()
            if is_paused.is_set():  # the pause took effect after all
                self.resume(domain, container)
            raise

    def resume(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        self._resuming.call(domain, lambda: self._resume(domain, container), self._limit)

    def _resume(self, domain: uuid.UUID, container: ContainerId | None) -> None:
        with contextlib.suppress(NotFound), self._using(domain, "resume", container) as found:
            try:
                found.resume()
            except libvirt.libvirtError:
                if power_of(found).power is Power.PAUSED:
                    raise

    def set_links(self, domain: uuid.UUID, container: ContainerId, *, up: bool) -> None:
        self._linking.call(domain, lambda: self._set_links(domain, container, up=up), self._limit)

    def _set_links(self, domain: uuid.UUID, container: ContainerId, *, up: bool) -> None:
        # libvirt does not know the NICs, because vmwrapper adds them. Its `qemuMonitorCommand` passes QEMU's errors on.
        import libvirt_qemu

        with self._using(domain, "set the links of", container) as found:
            if not found.isActive():
                raise WrongState(f"VM {domain} is off")
            for number in range(_MOST_NICS):
                asked = {"execute": "set_link", "arguments": {"name": f"virtshimnic{number}", "up": up}}
                answer = json.loads(libvirt_qemu.qemuMonitorCommand(found, json.dumps(asked), 0))
                if "return" in answer:
                    continue
                error = str(answer.get("error"))
                if "DeviceNotFound" in error:
                    return
                raise InternalError(f"QEMU cannot set the link of NIC {number} of VM {domain}: {escaped(error, 200)}")

    def out_of_space(self, domain: uuid.UUID) -> bool:
        try:
            errors = self._asking.call(domain, lambda: self._disk_errors(domain), self._limit)
        except (NotFound, WrongState):
            return False
        return bool(errors) and set(errors.values()) == {libvirt.VIR_DOMAIN_DISK_ERROR_NO_SPACE}

    def _disk_errors(self, domain: uuid.UUID) -> dict[str, int]:
        with self._using(domain, "ask for disk errors of") as found:
            return cast("dict[str, int]", found.diskErrors())  # libvirt-python's annotation says str

    def save_memory(
        self,
        domain: uuid.UUID,
        path: str,
        timeout: float,
        container: ContainerId | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        """Makes a snapshot of the memory only. The VM and its disks stay unchanged, and libvirt keeps no record of it."""
        with self._using(domain, "save the memory of", container) as found:
            over = threading.Event()
            try:
                with _aborted_after(found, timeout, over, hurry):
                    found.snapshotCreateXML(_request(found, path), libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA)
                _remove_secrets(found.connect(), path)  # type: ignore[no-untyped-call]
            except BaseException as exc:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                if over.is_set():
                    raise DeadlineExceeded(f"the memory of VM {domain} was not written within {timeout:g} s") from exc
                if isinstance(exc, libvirt.libvirtError) and (code_of(exc) in _ENDED or not found.isActive()):
                    raise Aborted(f"VM {domain} ended, or was being stopped, while its memory was written") from exc
                raise


def _request(found: libvirt.virDomain, path: str) -> str:
    snapshot = Element("domainsnapshot")
    SubElement(snapshot, "memory", snapshot="external", file=absolute_path(path, "memory file"))
    disks = SubElement(snapshot, "disks")
    for target in parsed(found.XMLDesc()).iterfind("devices/disk/target"):
        SubElement(disks, "disk", name=target.get("dev", ""), snapshot="no")
    return text_of(snapshot)


@contextlib.contextmanager
def _aborted_after(
    found: libvirt.virDomain, timeout: float, over: threading.Event, hurry: threading.Event | None
) -> Iterator[None]:
    """Aborts the domain's job, and sets `over`, if the block takes longer or `hurry` is set."""
    done = threading.Event()

    def wait() -> None:
        until = time.monotonic() + timeout
        pause = timeout if hurry is None else min(timeout, _AGAIN)
        while not done.wait(pause):
            if time.monotonic() < until and hurry is not None and not hurry.is_set():
                continue
            over.set()
            pause = _AGAIN
            try:
                found.abortJob()
            except libvirt.libvirtError as exc:
                log.debug("vm.job.not_aborted", name=found.name(), error=message_of(exc))

    thread = threading.Thread(target=wait, name="save-time-limit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _remove_secrets(conn: libvirt.virConnect, path: str) -> None:
    """Removes the values that open the pod's network from the VM's definition in the file, because archives leave the node."""
    definition = parsed(conn.saveImageGetXMLDesc(path, libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE))
    for commandline in definition.iterfind("{*}commandline"):
        for variable in commandline.findall("{*}env"):
            if variable.get("name") in SECRETS:
                commandline.remove(variable)
    conn.saveImageDefineXML(path, text_of(definition), 0)
