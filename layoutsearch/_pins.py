"""The two versions that must match, checked before TVM is loaded.

TVM's C++ side and `tvm_ffi` share an ABI that their version ranges do not express: with another `apache-tvm-ffi`
the first module that is saved ends the process with a segmentation fault.
"""

from __future__ import annotations

from importlib import metadata

PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


class PinError(ImportError):
    """An installed version that layoutsearch cannot run with."""


def check_pins(pins: dict[str, str] | None = None) -> None:
    """Raise PinError, with the pip command that repairs it, unless every pin holds."""
    pins = PINS if pins is None else pins
    broken = []
    for name, want in pins.items():
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            have = "nothing"
        if have != want:
            broken.append(f"{name}=={want} is needed, {have} is installed")
    if broken:
        fix = " ".join(f"{name}=={want}" for name, want in pins.items())
        raise PinError(f"layoutsearch: {'; '.join(broken)}. Run: pip install {fix}")
