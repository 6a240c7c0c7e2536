"""`make bench-compare REV=...` measures a revision and this checkout in turns, and writes bench/compare.json.

    make bench-compare REV=v0.1.0 BENCH_ARGS="--rounds 5 --only starts"

REV is laid out below build/compare, with a virtual environment of its own locks; both boot the guests of this checkout."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
# Smaller differences are not reported.
_NOISE = 0.05


@dataclass
class Compared:
    """The medians of one figure, one per round."""

    unit: str
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """New over old, pair by pair, because the machine's speed drifts."""
        return [new / old for old, new in zip(self.old, self.new, strict=True) if old]

    @property
    def verdict(self) -> str:
        """Returns "up" or "down" if every pair changed that way by more than noise. The figure decides which is good."""
        ratios = self.ratios
        if ratios and min(ratios) > 1 + _NOISE:
            return "up"
        if ratios and max(ratios) < 1 - _NOISE:
            return "down"
        return ""

    def document(self) -> dict[str, Any]:
        ratios = self.ratios
        return {
            "unit": self.unit,
            "old": {"median": statistics.median(self.old), "min": min(self.old), "max": max(self.old)},
            "new": {"median": statistics.median(self.new), "min": min(self.new), "max": max(self.new)},
            "ratio": statistics.median(ratios) if ratios else None,
            "verdict": self.verdict,
        }


def compared(rounds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Compared]:
    """The old and new values of the figures that both revisions have in all rounds."""
    found: dict[str, Compared] = {}
    shared = set.intersection(*({*old} & {*new} for old, new in rounds))
    for key in (key for key in rounds[0][1] if key in shared):
        one = found.setdefault(key, Compared(rounds[0][1][key]["unit"]))
        for old, new in rounds:
            one.old.append(float(old[key]["median"]))
            one.new.append(float(new[key]["median"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev", help="a revision, as git names it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="sections of the benchmark, by commas, if REV knows them")
    parser.add_argument("--output", default=str(PROJECT / "bench" / "compare.json"))
    options = parser.parse_args()
    commit = _git("rev-parse", "--verify", "--quiet", f"{options.rev}^{{commit}}")
    if not commit:
        parser.error(f"REV: git knows no revision {options.rev!r}")
    other = laid_out(commit)
    rounds = []
    for number in range(options.rounds):
        print(f"bench-compare: round {number + 1} of {options.rounds}", file=sys.stderr)
        # Which one goes first changes from round to round.
        found = {tree: figures(tree, options.only) for tree in ((other, PROJECT) if number % 2 else (PROJECT, other))}
        rounds.append((found[other], found[PROJECT]))
    result = compared(rounds)
    document = {
        "old": commit,
        "new": _git("describe", "--always", "--dirty", "--abbrev=40"),
        "rounds": options.rounds,
        "figures": {key: one.document() for key, one in result.items()},
    }
    output = Path(options.output)
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{'':36} {commit[:10]:>10} {'here':>10} {'ratio':>7}")
    for key, figure in document["figures"].items():
        ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
        old, new = figure["old"]["median"], figure["new"]["median"]
        print(f"{key:36} {old:>10.4g} {new:>10.4g} {ratio:>7} {figure['unit']:6} {figure['verdict']}")


def laid_out(commit: str) -> Path:
    """Checks out the revision with its own virtual environment, once."""
    tree = PROJECT / "build" / "compare" / commit[:12]
    if not (tree / "tests").exists():
        tree.mkdir(parents=True, exist_ok=True)
        with subprocess.Popen(["git", "archive", commit], cwd=PROJECT, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", tree], stdin=archive.stdout, check=True)
        if archive.returncode:
            raise SystemExit(f"bench-compare: git archive {commit} failed")
        # The same guests for both.
        (tree / "build").symlink_to(PROJECT / "build")
    # It creates the environment if it is missing, otherwise checks it.
    subprocess.run([tree / "deploy" / "setup.sh"], check=True, stdout=sys.stderr)
    return tree


def figures(tree: Path, only: str) -> dict[str, Any]:
    """One round of the tree's own benchmark."""
    output = tree / "bench" / "one-round.json"
    command = [tree / ".venv/bin/python", "-m", "tests.bench", "--rounds", "1", "--output", output]
    subprocess.run([*command, *(["--only", only] if only else [])], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(output.read_text())["figures"]
    output.unlink()
    assert isinstance(found, dict)
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
