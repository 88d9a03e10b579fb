"""An emulated AArch64 board: the Python of an arm64 Debian under qemu-user, with TVM's AArch64 wheel.

    python -m tests.emulation.board make      # once: 0.5 GB in LAYOUTSEARCH_ARM64_ROOT, build/arm64 by default
    python -m tests.emulation.board serve --tracker 127.0.0.1:9190 --key arm64 --threads 2

The Debian is unpacked and never installed, and the server starts no program of its own: neither the rights of root nor
binfmt_misc nor a chroot are needed. The server is this checkout's. Emulation shows what is right, never what is fast.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from layoutsearch._pins import PINS

ROOT_VARIABLE = "LAYOUTSEARCH_ARM64_ROOT"
TARGET = '{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}'
MAKE = "python -m tests.emulation.board make"

_CHECKOUT = Path(__file__).resolve().parents[2]
_SITE = "opt/board"
_PYTHON = "usr/bin/python3"
_EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
_PACKAGES = {
    _EMULATORS: "qemu-user",
    ("mmdebstrap",): "mmdebstrap",
    ("aarch64-linux-gnu-g++",): "g++-aarch64-linux-gnu",
}
# The oldest C library that wheels are tagged with.
_OLDEST_MINOR = 17
_DESCRIBE = "import os, sys; print(*sys.version_info[:2], os.confstr('CS_GNU_LIBC_VERSION').rpartition('.')[2])"


def place() -> Path:
    """The folder with the arm64 Debian, whether it is there or not."""
    return Path(os.environ.get(ROOT_VARIABLE) or _CHECKOUT / "build" / "arm64").absolute()


def why_missing(root: Path) -> str:
    """One line that says what the emulated board lacks; empty if it can be started."""
    if _emulator() is None:
        return f"no qemu-user on this machine; {MAKE}"
    if not (root / _SITE / "tvm").is_dir():
        return f"no arm64 Debian with TVM in {root}; {MAKE}, or set {ROOT_VARIABLE}"
    return ""


def command(root: Path, *args: str) -> list[str]:
    """The command line of the board's Python with `args`."""
    path = os.pathsep.join([str(root / _SITE), str(_CHECKOUT)])
    return [_emulator() or _EMULATORS[0], "-L", str(root), "-E", f"PYTHONPATH={path}", str(root / _PYTHON), *args]


def serve(root: Path, *args: str) -> list[str]:
    """The command line of the project's RPC server on the board."""
    return command(root, "-m", "layoutsearch.measure.server", *args)


def make(root: Path, suite: str, mirrors: Sequence[str]) -> None:
    """Make the arm64 Debian in `root`, a new folder, from apt's and pip's own sources."""
    if root.exists() and any(root.iterdir()):
        raise SystemExit(f"{root} is not empty: remove it, or set {ROOT_VARIABLE} to another folder")
    _install_tools()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="layoutsearch-") as folder:
        packed = f"{folder}/debian.tar"
        unpack = ["mmdebstrap", "--mode=chrootless", "--variant=extract", "--arch=arm64"]
        _run([*unpack, "--include=python3,libstdc++6,libgcc-s1", suite, packed, *mirrors])
        # Files of the user's own, whoever that is; device nodes are for root only, and the emulator has the host's.
        _run(["tar", "-xf", packed, "-C", str(root), "--no-same-owner", "--exclude=./dev"])
    _install_wheels(root)


def _install_tools() -> None:
    missing = [package for names, package in _PACKAGES.items() if not any(map(shutil.which, names))]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() or not shutil.which("apt-get"):
        raise SystemExit(f"{', '.join(missing)} not found: run sudo {' '.join(install)}")
    _run(["apt-get", "update"])
    _run(install)


def _install_wheels(root: Path) -> None:
    """With this machine's pip: in the emulator it takes minutes."""
    said = subprocess.run(command(root, "-c", _DESCRIBE), check=True, capture_output=True, text=True).stdout
    major, minor, libc = map(int, said.split())
    platforms = [f"manylinux_2_{n}_aarch64" for n in range(libc, _OLDEST_MINOR - 1, -1)]
    options = [option for name in platforms for option in ("--platform", name)]
    wanted = [f"{name}=={version}" for name, version in PINS.items()]
    pip = [sys.executable, "-m", "pip", "install", "--only-binary=:all:", "--python-version", f"{major}.{minor}"]
    _run([*pip, *options, "--target", str(root / _SITE), *wanted])


def _emulator() -> str | None:
    return next(filter(None, map(shutil.which, _EMULATORS)), None)


def _run(arguments: Sequence[str]) -> None:
    print("+", *arguments, flush=True)
    try:
        subprocess.run(arguments, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"the board could not be made: {error}") from None


def main() -> None:
    """Entry point of `python -m tests.emulation.board`."""
    parser = argparse.ArgumentParser(prog="tests.emulation.board", description="An emulated AArch64 board")
    commands = parser.add_subparsers(dest="what", required=True)
    making = commands.add_parser("make", help=f"make it in {ROOT_VARIABLE}")
    # Its Python must be one that TVM's wheels are built for.
    making.add_argument("--suite", default="bookworm", help="Debian release (default %(default)s)")
    making.add_argument("mirrors", nargs="*", metavar="MIRROR", help="for mmdebstrap; Debian's own by default")
    commands.add_parser("serve", help="start the RPC server on it; options are the server's", add_help=False)
    options, rest = parser.parse_known_args()
    root = place()
    if options.what == "make":
        if rest:
            parser.error(f"unknown: {' '.join(rest)}")
        make(root, options.suite, options.mirrors)
        print(f"made {root}")
        return
    if reason := why_missing(root):
        raise SystemExit(reason)
    line = serve(root, *rest)
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
