"""Fetch a pretrained model to try layoutsearch on: `python -m layoutsearch.demo --out models/`.

The PyPI wheel `rapidocr-onnxruntime` (Apache-2.0) holds the PP-OCRv4 text detector and angle classifier as ONNX files.
The wheel is downloaded by pip without its dependencies, and nothing in it is installed or run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from layoutsearch.errors import LayoutSearchError, ModelError

WHEEL = "rapidocr-onnxruntime==1.4.4"
DETECTOR = "ch_PP-OCRv4_det_infer.onnx"
CLASSIFIER = "ch_ppocr_mobile_v2.0_cls_infer.onnx"
MODELS = (DETECTOR, CLASSIFIER)


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary", ":all:"]
    # The wheel excludes new Python versions for the sake of dependencies that are not wanted here.
    command += ["--ignore-requires-python", "--disable-pip-version-check", "--dest", str(directory), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip exited with {result.returncode}"
        raise ModelError(
            f"pip could not download {WHEEL} ({reason}); check the network, or put {DETECTOR} there by hand"
        )
    return wheels[0]


def fetch_demo_model(directory: str | os.PathLike[str], name: str = DETECTOR) -> Path:
    """Make sure a model of the demo lies in `directory`, downloading it the first time.

    Args:
        directory: where the .onnx files are kept; created if need be.
        name: `DETECTOR` or `CLASSIFIER`.

    Returns:
        Path of the .onnx file.

    Raises:
        ModelError: pip cannot download the wheel, or the wheel does not hold the file.
    """
    target = Path(directory)
    if (target / name).is_file():
        return target / name
    target.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=target) as scratch,
        zipfile.ZipFile(_download_wheel(Path(scratch))) as wheel,
    ):
        members = {Path(member).name: member for member in wheel.namelist()}
        if name not in members:
            known = ", ".join(member for member in members if member.endswith(".onnx"))
            raise ModelError(f"{WHEEL} holds no {name}; it has {known}")
        for wanted in sorted({name, *MODELS} & set(members)):
            # Written beside and renamed, so that an interrupted run leaves no half a model.
            part = Path(scratch) / wanted
            part.write_bytes(wheel.read(members[wanted]))
            os.replace(part, target / wanted)
    return target / name


def main(arguments: list[str] | None = None) -> int:
    """Print the path of the demo model, fetching it if need be; 2 and one line on stderr where that fails."""
    parser = argparse.ArgumentParser(prog="python -m layoutsearch.demo", description="Fetch the demo model.")
    parser.add_argument("--out", default="models", help="directory for the .onnx files (default: models)")
    options = parser.parse_args(arguments)
    try:
        print(fetch_demo_model(options.out))
    except LayoutSearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
