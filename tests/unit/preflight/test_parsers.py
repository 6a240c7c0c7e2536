"""`virtshim check` reports whether the child process that reads images is confined."""

from __future__ import annotations

import pytest

from virtshim.images.confinement import OWN_USER, Account
from virtshim.preflight.confinement import no_parser_user, parser_confinement
from virtshim.preflight.finding import Level
from virtshim.preflight.virtualization import ProgramOutput

OWN, NOBODY = Account(OWN_USER, 990, 990), Account("nobody", 65534, 65534)
HOLDS = "uid 990\nlandlock 7\nnamespaces network ipc uts\n"


@pytest.mark.parametrize(
    ("who", "wanted", "said", "level", "words"),
    [
        (OWN, "", HOLDS, Level.OK, "Landlock 7, own namespaces: network ipc uts"),
        (OWN, "", "uid 990\nlandlock 7\nnamespaces \n", Level.OK, "runs as virtshim-parser, with seccomp, Landlock 7"),
        (OWN, "", "uid 990\nlandlock 0\nnamespaces\n", Level.WARNING, "has no Landlock"),
        (NOBODY, "", HOLDS, Level.WARNING, "parsed as nobody"),
        (NOBODY, "nobody", HOLDS, Level.OK, "runs as nobody"),
        (OWN, "", "", Level.ERROR, "keeps its rights"),
    ],
)
def test_each_missing_layer_is_named(who: Account, wanted: str, said: str, level: Level, words: str) -> None:
    found = parser_confinement(who, wanted, ProgramOutput(said))
    assert (found.level, bool(found.remedy)) == (level, level is not Level.OK)
    assert words in found.text


def test_a_child_that_cannot_drop_its_privileges_is_an_error() -> None:
    found = parser_confinement(OWN, "", ProgramOutput(trouble="it cannot drop its rights: Operation not permitted"))
    assert found.level is Level.ERROR
    assert "Operation not permitted" in found.text
    assert no_parser_user("there is no user").level is Level.ERROR
