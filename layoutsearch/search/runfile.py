"""What a run was about, beside its plan, so that it can be resumed or a mix-up noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layoutsearch.errors import LayoutSearchError


class RunFile:
    """`run.json` in the output folder."""

    def __init__(
        self, path: Path, fingerprint: str, target: Mapping[str, Any], threads: int, device_key: str | None
    ) -> None:
        self._path = path
        self._about = {
            "fingerprint": fingerprint,
            "target": dict(target),
            "threads": threads,
            "device_key": device_key or "local",
        }
        self._settled: dict[str, str] = {}

    def begin(self, resume: bool) -> None:
        """Start a run.

        Raises:
            LayoutSearchError: `resume` was asked for and there is no run, or one of another model, target or device;
                or the folder cannot be written.
        """
        before = self._read()
        if resume and not before:
            raise LayoutSearchError(
                f"--resume: there is no run in {self._path.parent}; leave --resume away to start one"
            )
        if resume:
            for key, value in self._about.items():
                if before.get(key) != value:
                    raise LayoutSearchError(
                        f"--resume: the run in {self._path.parent} has {key} {before.get(key)!r}, this one {value!r}; "
                        "use another --out, or leave --resume away"
                    )
        if all(before.get(key) == value for key, value in self._about.items()):
            self._settled = dict(before.get("settled", {}))
        self._write("running")

    def is_settled(self, question: str, about: str) -> bool:
        """Whether an earlier run, or this one, has settled a question, for exactly what `about` is a digest of."""
        return self._settled.get(question) == about

    def settle(self, question: str, about: str) -> None:
        """Remember that a question is settled."""
        self._settled[question] = about
        self._write("running")

    def finish(self, interrupted: bool) -> None:
        """Mark the end."""
        self._write("interrupted" if interrupted else "done")

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _write(self, state: str) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(
                json.dumps({**self._about, "settled": self._settled, "state": state}, indent=1) + "\n", encoding="utf-8"
            )
            temporary.replace(self._path)
        except OSError as error:
            why = f"cannot write {self._path}: {error.strerror}"
            raise LayoutSearchError(f"--out: {why}; name another folder") from None
