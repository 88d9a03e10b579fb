"""`python -m layoutsearch.zoo NAME --out FOLDER`: write one of the project's own models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnx

from layoutsearch.zoo import MODELS


def main(arguments: list[str] | None = None) -> int:
    """Print the path of the model; 2 and one line on stderr where it cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m layoutsearch.zoo", description="Write a model as ONNX.")
    parser.add_argument("name", choices=sorted(MODELS), help="which model")
    parser.add_argument("--out", default="models", help="folder for NAME.onnx (default: models)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    options = parser.parse_args(arguments)
    path = Path(options.out) / f"{options.name}.onnx"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(MODELS[options.name](options.seed), str(path))
    except OSError as error:
        print(f"error: cannot write {path}: {error.strerror}; name another --out", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
