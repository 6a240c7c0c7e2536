"""Each VM has a user id that no other VM, process or file has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.adopted import running
from fakes.world import World, container_config

from virtshim.containers.new_record import VmUids
from virtshim.model.errors import ResourceExhausted, WrongState

FIRST = 3_000_000_000


def uid_of(world: World, pod: str) -> int:
    """Of a new VM, as its record and its definition have it."""
    container = world.create(world.run(pod), config=container_config())
    record = world.container(container).spec.uid
    assert world.outside.vms.spec(world.domain(container)).uid == record
    return record


def chosen(world: World, count: int, in_use: Callable[[], set[int]] = set) -> VmUids:
    return VmUids(world.app.adapters.records, FIRST, count, in_use)


def test_every_vm_has_its_own_uid(world: World) -> None:
    found = [uid_of(world, f"pod-{number}") for number in range(3)]
    assert len(set(found)) == 3
    assert 0 not in found


def test_a_removed_vms_uid_is_reused_only_when_no_other_is_free(world: World) -> None:
    uids = chosen(world, 3)
    taken = []
    for _ in range(4):
        with uids.free() as uid:
            taken.append(uid - FIRST)
    assert taken == [0, 1, 2, 0]


def test_a_uid_that_a_process_or_a_file_still_has_is_skipped(world: World) -> None:
    with chosen(world, 3, lambda: {FIRST, FIRST + 1}).free() as uid:
        assert uid == FIRST + 2


def test_when_all_uids_are_taken_the_error_names_the_setting(world: World) -> None:
    with pytest.raises(ResourceExhausted, match=r"libvirt\.vm_uids"), chosen(world, 1, lambda: {FIRST}).free():
        pass


def test_without_a_uid_range_vms_have_no_uids(world: World) -> None:
    with chosen(world, 0).free() as uid:
        assert uid == 0


def test_a_vms_passt_has_a_user_id_of_its_own_which_no_later_vm_gets(world: World) -> None:
    own = world.container(running(world)).spec
    with chosen(world, 4).free_for(passt=True) as found:
        assert found == (FIRST, FIRST + 1)
    assert own.passt_uid not in (0, own.uid)
    assert uid_of(world, "alone") not in (own.uid, own.passt_uid)
    assert [one.spec.passt_uid for one in world.records.containers.all()] == [own.passt_uid, 0]


def test_without_a_uid_range_there_is_no_passt(world: World) -> None:
    with pytest.raises(WrongState, match=r"set libvirt\.vm_uids"), chosen(world, 0).free_for(passt=True):
        pass


def test_a_restarted_daemon_gives_out_no_uid_that_a_record_has(world: World) -> None:
    before = uid_of(world, "one")
    after = world.restarted()
    try:
        assert uid_of(after, "two") != before
    finally:
        after.close()
