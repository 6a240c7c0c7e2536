"""Makes the Python code of the wire contracts from the .proto files beside this module; not imported at run time.

Run it after a change of a .proto file or of the locked protobuf and gRPC versions, and commit what it writes:

    python -m criproto.generate            writes the generated files
    python -m criproto.generate --check    writes nothing, exits 1 when a generated file differs

The output depends on the .proto text and the locked tools only, so two runs give the same bytes.
"""

import argparse
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]  # nobody publishes stubs for it

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Contract:
    """One .proto file and the package under criproto that holds its generated code."""

    proto: str
    package: str

    @property
    def virtual_path(self) -> str:
        """The path protoc is told, which decides what the generated modules call each other."""
        return f"criproto/{self.package}/{self.proto}"


CONTRACTS = (
    Contract("api.proto", "runtime_v1"),
    Contract("deviceplugin.proto", "deviceplugin_v1beta1"),
    Contract("podresources.proto", "podresources_v1"),
    Contract("admin.proto", "admin_v1"),
    Contract("operator.proto", "operator_v1"),
)


class GenerationFailed(Exception):
    """protoc or one of its plugins refused; what it said went to standard error."""


def generated_files(contract: Contract, directory: Path = HERE) -> dict[str, bytes]:
    """Compile the contract in that directory: name and content of each file its package must hold beside the empty
    __init__.py."""
    with tempfile.TemporaryDirectory(prefix="criproto-") as scratch:
        out = Path(scratch)
        arguments = [
            "protoc",
            f"--proto_path=criproto/{contract.package}={directory}",
            *_plugins("mypy", "mypy_grpc"),
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet,only_sync:{out}",
            contract.virtual_path,
        ]
        if protoc.main(arguments) != 0:
            raise GenerationFailed(contract.virtual_path)
        made = sorted((out / "criproto" / contract.package).iterdir())
        return {path.name: path.read_bytes() for path in made}


def stale_files(directory: Path = HERE, contracts: Sequence[Contract] = CONTRACTS) -> list[str]:
    """The generated files that are missing, differ, or no longer belong there, as paths under the directory."""
    stale: list[str] = []
    for contract in contracts:
        wanted = generated_files(contract, directory) | {"__init__.py": b""}
        there = {path.name: path.read_bytes() for path in (directory / contract.package).glob("*.py*")}
        names = sorted(wanted.keys() | there.keys())
        stale += [f"{contract.package}/{name}" for name in names if wanted.get(name) != there.get(name)]
    return stale


def write_files(directory: Path = HERE, contracts: Sequence[Contract] = CONTRACTS) -> None:
    """Write every package anew."""
    for contract in contracts:
        package = directory / contract.package
        package.mkdir(exist_ok=True)
        for name, content in (generated_files(contract, directory) | {"__init__.py": b""}).items():
            (package / name).write_bytes(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m criproto.generate", description="Generate the code of the wire contracts."
    )
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit 1 when a generated file is out of date"
    )
    check_only = parser.parse_args(argv).check
    if not check_only:
        write_files()
        return 0
    stale = stale_files()
    for name in stale:
        sys.stderr.write(f"out of date: criproto/{name}\n")
    return 1 if stale else 0


def _plugins(*names: str) -> list[str]:
    """protoc looks plugins up on PATH; these are the ones of this very environment."""
    scripts = Path(sysconfig.get_path("scripts"))
    return [f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}" for name in names]


if __name__ == "__main__":
    sys.exit(main())
