"""The work of `virtshim setup`: it collects facts, plans, writes files and enables units; and it reverts all of that."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from virtshim.config.settings import DEFAULT_FILE, Settings, merged_settings
from virtshim.devices.host_files import HostFiles
from virtshim.model.errors import Aborted, InvalidRequest, PermissionRefused, ShimError, WrongState
from virtshim.setup import changes as files_of
from virtshim.setup import next_steps
from virtshim.setup.changes import LOCK, Action, Change, Manifest
from virtshim.setup.facts import NodeFacts, kubelet_version, look
from virtshim.setup.kubelet_plan import of_vms_only
from virtshim.setup.plan import EDITED, OwnSettings, Plan, plan
from virtshim.setup.tree import FilesBefore, NodeTree
from virtshim.setup.units import GUESTS_UNIT, Systemctl, pending
from virtshim.system.files import FileLocked, lock_file

_MOST: Final = 1 << 20
# Only the operator enables this socket.
_SOCKET: Final = "tapmanager.socket"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done or would be done. `plan`: None for an undo. `enabled` to `unmasked`: units whose state changes. `pending`:
    systemctl commands that an earlier, killed run did not reach. `failed`: changes of units that failed. `steps`: the steps
    that remain for the operator, in order."""

    facts: NodeFacts
    plan: Plan | None
    changes: tuple[Change, ...]
    enabled: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    unmasked: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    activated: tuple[str, ...] = ()
    """Sockets that the operator enabled, and that would restart a stopped service."""
    steps: tuple[str, ...] = ()

    @property
    def units(self) -> dict[str, tuple[str, ...]]:
        """The units whose state changes, by what is done with them."""
        return {
            "enabled": self.enabled,
            "started": self.started,
            "disabled": self.disabled,
            "stopped": self.stopped,
            "masked": self.masked,
            "unmasked": self.unmasked,
        }

    @property
    def changes_nothing(self) -> bool:
        return not self.changed and not self.pending and not any(self.units.values())

    @property
    def changed(self) -> frozenset[str]:
        return _changed(self.changes)


class NodeSetup:
    def __init__(self, tree: NodeTree, systemctl: Systemctl) -> None:
        self._tree = tree
        self._systemctl = systemctl

    def planned(self, *, vms_only: bool | None = None, name: str = "NODE") -> Outcome:
        """What `set_up` would do. Changes nothing. `vms_only`: None means as in the previous setup. Raises WrongState,
        InvalidRequest."""
        return self._planned(files_of.read_manifest(self._tree), vms_only, name)

    def set_up(self, *, vms_only: bool | None = None, name: str = "NODE") -> Outcome:
        """Sets up the node, or changes nothing if the plan has a refusal. Raises ShimError; the manifest then records what was
        written, and the systemctl commands that are still to run."""
        facts, wanted = self._wanted(files_of.read_manifest(self._tree), vms_only, name)
        if wanted.refusal:
            return Outcome(facts, wanted, ())
        with self._alone() as made:
            manifest = files_of.read_manifest(self._tree)
            found = self._planned(manifest, vms_only, name)
            # Record which units do not run before changing any: after a kill, the next run must not take units that the operator
            # enabled for its own.
            sleeping = [unit for unit in found.enabled if not self._is_up(unit)]
            before = manifest.started if manifest.started is not None else manifest.enabled
            manifest = replace(
                self._with_pending(manifest, found),
                directories=(*manifest.directories, *made),
                enabled=_once(*manifest.enabled, *found.enabled),
                started=_once(*before, *found.started, *sleeping),
                masked=_once(*manifest.masked, *found.masked),
                vms_only=found.facts.vms_only,
            )
            manifest = files_of.apply(self._tree, manifest, found.changes)
            failed = [*self._try("mask", found.masked), *self._retired(found)]
            manifest, unpaid = self._pending_done(manifest)
            failed += [*unpaid, *self._try("enable", self._to_enable(found))]
            gone = {*found.stopped, *found.disabled, *found.unmasked} if not failed else set()
            files_of.save(
                self._tree,
                replace(
                    manifest,
                    enabled=tuple(unit for unit in manifest.enabled if unit not in gone),
                    started=tuple(unit for unit in manifest.started or () if unit not in gone),
                    masked=tuple(unit for unit in manifest.masked if unit not in gone),
                ),
            )
            return replace(found, failed=tuple(failed))

    def undo_planned(self, *, name: str = "NODE") -> Outcome:
        """What `undo` would do. Changes nothing."""
        return self._undo_planned(files_of.read_manifest(self._tree), name)

    def undo(self, *, name: str = "NODE") -> Outcome:
        """Reverts the setup. The manifest keeps what failed, for the next run."""
        with self._alone() as made:
            manifest = files_of.read_manifest(self._tree)
            found = self._undo_planned(manifest, name)
            manifest = replace(self._with_pending(manifest, found), directories=(*manifest.directories, *made))
            files_of.save(self._tree, manifest)
            failed = self._retired(found)
            manifest = files_of.undo(self._tree, manifest, found.changes)
            manifest, unpaid = self._pending_done(manifest)
            failed += unpaid
            if failed:
                files_of.save(self._tree, manifest)
            else:
                files_of.forget(self._tree, manifest)
            return replace(found, failed=tuple(failed))

    def _wanted(self, manifest: Manifest, vms_only: bool | None, name: str) -> tuple[NodeFacts, Plan]:
        files = FilesBefore(self._tree.root, files_of.before(self._tree, manifest))
        own = _own_settings(files)
        said = "tapmanager.cni_conf_dir" in own.said
        directory = own.settings.tapmanager.cni_conf_dir if said else ""
        alone = manifest.vms_only if vms_only is None else vms_only
        facts = look(files, EDITED, directory, vms_only=alone, is_image=self._tree.root != "/")
        version = kubelet_version(self._systemctl.program_output("kubelet", "--version"))
        facts = replace(facts, kubelet_version=version)
        had_taint = of_vms_only([entry.path for entry in manifest.entries])
        return facts, plan(facts, own, name=name, had_taint=had_taint)

    def _planned(self, manifest: Manifest, vms_only: bool | None, name: str) -> Outcome:
        facts, wanted = self._wanted(manifest, vms_only, name)
        if wanted.refusal:
            return Outcome(facts, wanted, ())
        changes = files_of.planned(self._tree, manifest, wanted.files)
        states = {unit: self._state(unit) for unit in (*wanted.enable, *wanted.mask)}
        # libvirt-guests may be masked: VMs run without it.
        needed = [unit for unit in wanted.enable if unit != GUESTS_UNIT]
        blocked = [unit for unit in needed if states[unit].startswith("masked") and not self._is_up(unit)]
        problems = [f"{unit} is masked; run systemctl unmask {unit}, then run this command again" for unit in blocked]
        if wanted.enable and not self._systemctl.can_change:
            problems.append(_by_hand(wanted, changes, facts))
        # Units that an earlier setup enabled and this one does not want are disabled.
        stale = self._given_up(manifest, keep=(*wanted.enable, *wanted.mask))
        return replace(
            stale,
            facts=facts,
            plan=replace(wanted, problems=(*wanted.problems, *problems)),
            steps=wanted.steps,
            changes=tuple(changes),
            enabled=tuple(unit for unit in wanted.enable if states[unit] == "disabled"),
            started=tuple(unit for unit in wanted.enable if states[unit] == "enabled" and self._sleeps(unit)),
            masked=tuple(unit for unit in wanted.mask if states[unit] and self._is_open(unit, states[unit], manifest)),
        )

    def _undo_planned(self, manifest: Manifest, name: str) -> Outcome:
        facts = look(FilesBefore(self._tree.root, files_of.before(self._tree, manifest)), ())
        found = self._given_up(manifest, keep=())
        changes = files_of.taken_back(self._tree, manifest)
        gone = [one.path for one in changes if one.action in (Action.RESTORE, Action.REMOVE)]
        steps = next_steps.after_undo(facts, name, [one.path for one in changes], gone, found.activated)
        return replace(found, facts=facts, changes=tuple(changes), steps=tuple(steps))

    def _given_up(self, manifest: Manifest, keep: Collection[str]) -> Outcome:
        """Returns units to their state before setup, except those in `keep`."""
        started = manifest.started if manifest.started is not None else manifest.enabled
        left = [unit for unit in _once(*manifest.enabled) if unit not in keep]
        ours = [unit for unit in reversed(_once(*started)) if unit not in keep and unit != GUESTS_UNIT]
        stopped = tuple(unit for unit in ours if self._is_up(unit))
        activated = "tapmanager.service" in stopped and self._is_up(_SOCKET)
        return Outcome(
            NodeFacts(),
            None,
            (),
            disabled=tuple(unit for unit in left if self._state(unit) == "enabled"),
            stopped=stopped,
            unmasked=tuple(
                unit for unit in _once(*manifest.masked) if unit not in keep and self._state(unit) == "masked"
            ),
            pending=tuple(" ".join(words) for words in manifest.pending),
            activated=(_SOCKET,) if activated else (),
        )

    def _is_open(self, unit: str, state: str, manifest: Manifest) -> bool:
        """Whether a socket that must be masked is still open. A killed run may have masked the socket but not stopped it."""
        return state != "masked" or (unit in manifest.masked and self._is_up(unit))

    def _state(self, unit: str) -> str:
        """The unit's state; "" where units cannot be changed."""
        return self._systemctl.state(unit) if self._systemctl.can_change else ""

    def _is_up(self, unit: str) -> bool:
        return self._systemctl.runs and not self._systemctl.is_idle(unit)

    def _sleeps(self, unit: str) -> bool:
        return self._systemctl.runs and not self._systemctl.is_active(unit)

    def _to_enable(self, found: Outcome) -> list[str]:
        """The units to enable or start, in their order. libvirt comes first, because virtshim needs its sockets."""
        wanted = found.plan.enable if found.plan else ()
        return [unit for unit in wanted if unit in (*found.enabled, *found.started)]

    def _retired(self, found: Outcome) -> list[str]:
        """Disables, stops and unmasks units. Returns the failures."""
        return [
            *self._try("stop", found.stopped),
            *self._try("disable", found.disabled),
            *self._try("unmask", found.unmasked),
        ]

    def _with_pending(self, manifest: Manifest, found: Outcome) -> Manifest:
        """Adds the systemctl commands that the changes require. The manifest is saved before the files change: after a kill, the
        next run finds the files unchanged and would not know that the commands are still to run. Without systemd
        there are none."""
        if not self._systemctl.runs:
            return manifest
        more = pending(found.changed, found.facts, unmasked=found.unmasked)
        return replace(manifest, pending=tuple(dict.fromkeys((*manifest.pending, *more))))

    def _pending_done(self, manifest: Manifest) -> tuple[Manifest, list[str]]:
        """Runs the pending systemctl commands. Returns the manifest with those that failed, and the failures."""
        left, failed = [], []
        for words in manifest.pending:
            try:
                self._systemctl.tell(*words)
            except ShimError as exc:
                left.append(words)
                failed.append(str(exc))
        return replace(manifest, pending=tuple(left)), failed

    def _try(self, verb: str, units: Sequence[str]) -> list[str]:
        """Changes the units one by one, so that one failure does not stop the others. Returns the failures."""
        failed = []
        for unit in units:
            try:
                self._systemctl.change(verb, unit)
            except ShimError as exc:
                failed.append(str(exc))
        return failed

    @contextlib.contextmanager
    def _alone(self) -> Iterator[tuple[str, ...]]:
        """Holds the lock of setup within the block. Yields the directories that were made for it."""
        if os.geteuid() != 0:
            raise PermissionRefused(
                "virtshim setup writes below /etc; run it as root, or use --dry-run to see the changes"
            )
        made = files_of.make_state_directory(self._tree)
        try:
            held = lock_file(f"{self._tree.root.rstrip('/')}{LOCK}")
        except FileLocked as exc:
            raise Aborted(f"another virtshim setup is running (process {exc.holder}); wait until it ends") from exc
        except OSError as exc:
            raise WrongState(f"{LOCK} cannot be locked: {exc.strerror}; move it away") from exc
        try:
            yield made
        finally:
            os.close(held)


def _by_hand(wanted: Plan, changes: Sequence[Change], facts: NodeFacts) -> str:
    """The problem of a machine without systemd."""
    text = f"systemd does not run here; start these services by other means: {', '.join(wanted.enable)}"
    reading = [words[-1] for words in pending(_changed(changes), facts) if words[0] == "try-restart"]
    again = [unit for unit in reading if unit not in wanted.enable]
    return f"{text}; if it runs, restart {', '.join(again)}, too" if again else text


def _changed(changes: Sequence[Change]) -> frozenset[str]:
    """The paths of the changed files."""
    return frozenset(one.path for one in changes if one.action not in (Action.SAME, Action.KEEP))


def _once(*units: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(units))


def _own_settings(files: HostFiles) -> OwnSettings:
    """The settings in the operator's files, without files that setup wrote. Raises InvalidRequest."""
    documents = [path for path in (DEFAULT_FILE,) if files.exists(path)]
    documents += [f"{DEFAULT_FILE}.d/{name}" for name in files.names(f"{DEFAULT_FILE}.d") if name.endswith(".toml")]
    values: dict[str, Any] = {}
    has_file = False
    for path in documents:
        try:
            document = tomllib.loads(files.content(path, _MOST).decode())
            has_file = has_file or (path == DEFAULT_FILE and bool(document))
            values = merged_settings(values, document)
        except (ShimError, tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise InvalidRequest(f"{path}: {exc}; correct the file first") from exc
    try:
        settings = Settings(**values)
    except ValidationError as exc:
        fault = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise InvalidRequest(f"{DEFAULT_FILE}: {where}: {fault['msg']}; correct the file first") from exc
    said = {f"{table}.{key}" for table, keys in values.items() if isinstance(keys, dict) for key in keys}
    return OwnSettings(settings, frozenset(said), has_file)
