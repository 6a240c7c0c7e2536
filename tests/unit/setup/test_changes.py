"""Set-up writes and restores files exactly, whoever changed them meanwhile, and wherever it was killed."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from virtshim.model.errors import WrongState
from virtshim.setup import changes
from virtshim.setup.changes import DIRECTORY, FILE, Action, PlannedFile
from virtshim.setup.tree import FilesBefore, NodeTree

pytestmark = pytest.mark.operator

NEW = PlannedFile("/etc/virtshim/a/new.conf", b"new\n", "why")
CHANGED = PlannedFile("/etc/crictl.yaml", b"ours\n", "why")
STATE = DIRECTORY.rpartition("/")[0]


class Killed(BaseException):
    """As SIGKILL: nobody catches it."""


class DyingTree(NodeTree):
    """Dies before its n-th change, or after it."""

    def __init__(self, root: str, at: int, *, after: bool = False) -> None:
        super().__init__(root)
        self._left, self._after = at, after

    def _count(self, change: object) -> None:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        change()  # type: ignore[operator]
        if self._left == 0:
            raise Killed

    def write(self, path: str, content: bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
        self._count(lambda: super(DyingTree, self).write(path, content, mode, owner))

    def remove(self, path: str) -> None:
        self._count(lambda: super(DyingTree, self).remove(path))

    def make_directory(self, path: str, mode: int = 0o755) -> None:
        self._count(lambda: super(DyingTree, self).make_directory(path, mode))

    def remove_directory(self, path: str) -> None:
        self._count(lambda: super(DyingTree, self).remove_directory(path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / STATE.lstrip("/")).mkdir(parents=True)
    (tmp_path / "etc/crictl.yaml").write_text("theirs\n")
    (tmp_path / "etc/crictl.yaml").chmod(0o640)
    return tmp_path


def seen(root: Path) -> dict[str, tuple[int, bytes | None]]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = f"/{path.relative_to(root)}"
        if not name.startswith(DIRECTORY):
            found[name] = (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
    return found


def set_up(tree: NodeTree, files: Sequence[PlannedFile] = (NEW, CHANGED)) -> list[changes.Change]:
    made = changes.make_state_directory(tree)
    assert all(one.startswith(DIRECTORY) for one in made)
    manifest = changes.read_manifest(tree)
    planned = changes.planned(tree, manifest, files)
    changes.apply(tree, manifest, planned)
    return planned


def undo(tree: NodeTree) -> list[changes.Change]:
    made = changes.make_state_directory(tree)
    manifest = changes.read_manifest(tree)
    manifest = replace(manifest, directories=(*manifest.directories, *made))
    planned = changes.taken_back(tree, manifest)
    changes.forget(tree, changes.undo(tree, manifest, planned))
    return planned


def actions(found: Sequence[changes.Change]) -> dict[str, Action]:
    return {one.path: one.action for one in found}


def test_undo_restores_files_modes_and_directories(root: Path) -> None:
    before = seen(root)
    tree = NodeTree(str(root))
    assert actions(set_up(tree)) == {NEW.path: Action.CREATE, CHANGED.path: Action.REPLACE}
    assert (root / "etc/crictl.yaml").read_text() == "ours\n"
    assert (root / "etc/crictl.yaml").stat().st_mode & 0o777 == 0o640  # as closed as it was
    assert actions(undo(tree)) == {CHANGED.path: Action.RESTORE, NEW.path: Action.REMOVE}
    assert seen(root) == before
    assert not (root / DIRECTORY.lstrip("/")).exists()


def test_a_second_run_changes_nothing_and_undo_still_goes_back_to_the_first(root: Path) -> None:
    before, tree = seen(root), NodeTree(str(root))
    set_up(tree)
    after = seen(root)
    assert set(actions(set_up(tree)).values()) == {Action.SAME}
    assert seen(root) == after
    undo(tree)
    assert seen(root) == before


def test_a_new_version_updates_its_files_and_removes_obsolete_ones(root: Path) -> None:
    before, tree = seen(root), NodeTree(str(root))
    set_up(tree)
    found = set_up(tree, [PlannedFile(NEW.path, b"newer\n", "why")])
    assert actions(found) == {NEW.path: Action.UPDATE, CHANGED.path: Action.RESTORE}
    assert (root / "etc/crictl.yaml").read_text() == "theirs\n"
    undo(tree)
    assert seen(root) == before


def test_a_file_that_the_operator_changed_is_kept_and_named_by_set_up_and_undo(root: Path) -> None:
    tree = NodeTree(str(root))
    set_up(tree)
    (root / "etc/crictl.yaml").write_text("mine now\n")
    (root / NEW.path.lstrip("/")).write_text("mine, too\n")
    assert set(actions(set_up(tree)).values()) == {Action.KEEP}
    found = undo(tree)
    assert set(actions(found).values()) == {Action.KEEP}
    assert (root / "etc/crictl.yaml").read_text() == "mine now\n"
    assert (root / NEW.path.lstrip("/")).read_text() == "mine, too\n"
    (named,) = [one.note for one in found if one.path == CHANGED.path]
    backup = named.rpartition(" ")[2]
    assert (root / backup.lstrip("/")).read_text() == "theirs\n"


def test_an_existing_file_is_kept_if_the_plan_says_so_and_never_removed_by_undo(root: Path) -> None:
    tree = NodeTree(str(root))
    (root / "etc/same").write_text("same\n")
    found = set_up(
        tree, [PlannedFile(CHANGED.path, b"ours\n", "why", keeps=True), PlannedFile("/etc/same", b"same\n", "why")]
    )
    assert actions(found) == {CHANGED.path: Action.KEEP, "/etc/same": Action.SAME}
    assert undo(tree) == []
    assert (root / "etc/same").exists()


def test_anything_but_a_regular_file_is_refused_by_name(root: Path) -> None:
    (root / "etc/crictl.yaml").unlink()
    (root / "etc/crictl.yaml").symlink_to("elsewhere")
    with pytest.raises(WrongState, match=r"/etc/crictl\.yaml is not a regular file"):
        set_up(NodeTree(str(root)))


def test_a_link_out_of_the_root_is_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (root / "etc/virtshim").symlink_to(elsewhere)
    with pytest.raises(WrongState, match="leads out of"):
        set_up(NodeTree(str(root)))
    assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("text", ["{", '{"version": 2}', '{"entries": 1}'])
def test_an_unusable_manifest_stops_set_up_and_undo(root: Path, text: str) -> None:
    (root / FILE.lstrip("/")).parent.mkdir()
    (root / FILE.lstrip("/")).write_text(text)
    with pytest.raises(WrongState, match=r"manifest\.json"):
        undo(NodeTree(str(root)))


@pytest.mark.parametrize("after", [False, True])
def test_undo_after_a_set_up_killed_anywhere_leaves_nothing(root: Path, after: bool) -> None:
    before = seen(root)
    for at in itertools.count(1):
        died = dies(root, at, after=after, work=set_up)
        undo(NodeTree(str(root)))
        assert seen(root) == before, at
        if not died:
            break


def test_temporary_files_of_a_killed_write_are_removed_and_no_others(root: Path) -> None:
    (root / "etc/crictl.yaml.new").write_text("the operator's")
    before, tree = seen(root), NodeTree(str(root))
    set_up(tree)
    (root / "etc/crictl.yaml.virtshim-setup").write_text("ou")
    undo(tree)
    assert seen(root) == before


def test_a_file_replaced_by_a_link_counts_as_changed_by_the_operator(root: Path) -> None:
    tree = NodeTree(str(root))
    set_up(tree)
    (root / "etc/crictl.yaml").unlink()
    (root / "etc/crictl.yaml").symlink_to("/dev/null")
    files = FilesBefore(str(root), changes.before(tree, changes.read_manifest(tree)))
    assert files.text("/etc/crictl.yaml") == ""
    assert actions(set_up(tree))[CHANGED.path] is Action.KEEP
    assert actions(undo(tree)) == {CHANGED.path: Action.KEEP, NEW.path: Action.REMOVE}
    assert os.readlink(root / "etc/crictl.yaml") == "/dev/null"


def test_a_link_in_place_of_a_file_is_kept(root: Path) -> None:
    (root / "etc/mine.toml").write_text("x = 1\n")
    (root / "etc/config.toml").symlink_to("mine.toml")
    found = set_up(NodeTree(str(root)), [PlannedFile("/etc/config.toml", b"ours\n", "why", keeps=True)])
    assert actions(found) == {"/etc/config.toml": Action.KEEP}
    assert (root / "etc/mine.toml").read_text() == "x = 1\n"


def test_a_failed_write_is_reported_with_the_path_and_completed_by_the_next_run(root: Path) -> None:
    before, tree = seen(root), NodeTree(str(root))
    # Nobody, not even root, writes a file into a file.
    (root / "etc/virtshim").write_text("")
    with pytest.raises(WrongState, match=r"/etc/virtshim/a cannot be made: Not a directory; correct that"):
        set_up(tree)
    (root / "etc/virtshim").unlink()
    set_up(tree)
    assert (root / NEW.path.lstrip("/")).read_text() == "new\n"
    undo(tree)
    assert seen(root) == before


def test_a_file_that_is_too_long_to_be_backed_up_is_refused(root: Path) -> None:
    os.truncate(root / "etc/crictl.yaml", 9 << 20)
    with pytest.raises(WrongState, match=r"/etc/crictl\.yaml is longer than"):
        set_up(NodeTree(str(root)))


def test_a_file_appears_with_its_owner_and_mode(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed after the rename leaves nothing to mend."""
    modes: list[int] = []
    real = os.replace
    monkeypatch.setattr(
        os, "replace", lambda new, place: (modes.append(os.stat(new).st_mode & 0o7777), real(new, place))
    )
    NodeTree(str(root)).write("/etc/crictl.yaml", b"x", 0o2750)
    assert modes == [0o2750]


def dies(root: Path, at: int, *, after: bool, work: object) -> bool:
    try:
        work(DyingTree(str(root), at, after=after))  # type: ignore[operator]
    except Killed:
        return True
    return False


def test_the_node_can_be_read_as_it_was_before_set_up(root: Path) -> None:
    tree = NodeTree(str(root))
    set_up(tree)
    files = FilesBefore(str(root), changes.before(tree, changes.read_manifest(tree)))
    assert files.text("/etc/crictl.yaml") == "theirs"
    assert files.content("/etc/crictl.yaml", 100) == b"theirs\n"
    assert not files.exists(NEW.path)
    assert files.names("/etc/virtshim/a") == []
    (root / "etc/crictl.yaml").write_text("mine now\n")
    files = FilesBefore(str(root), changes.before(tree, changes.read_manifest(tree)))
    assert files.text("/etc/crictl.yaml") == "mine now"
