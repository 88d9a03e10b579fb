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
        self,
        path: Path,
        fingerprint: str,
        target: Mapping[str, Any],
        threads: int,
        device: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._about = {"fingerprint": fingerprint, "target": dict(target), "threads": threads, "device_key": device}
        self._options = dict(options or {})
        self._settled: dict[str, str] = {}
        self._began: int | None = None
        self._goes_on = False

    def begin(self, resume: bool) -> None:
        """Start a run, or go on with the one in the folder if `resume`.

        Raises:
            LayoutSearchError: `resume` was asked for and there is no run, or one of another model, target, device or
                options; or the folder cannot be written.
        """
        before = self._read()
        if resume and not before:
            raise LayoutSearchError(
                f"--resume: there is no run in {self._path.parent}; leave --resume away to start one"
            )
        if resume:
            options = before.get("options", {})
            for key, value in {**self._about, **self._options}.items():
                has = before.get(key) if key in self._about else options.get(key)
                if has != value:
                    raise LayoutSearchError(
                        f"--resume: the run in {self._path.parent} has {key} {has!r}, this one {value!r}; "
                        "use another --out, or leave --resume away"
                    )
        if all(before.get(key) == value for key, value in self._about.items()):
            self._settled = dict(before.get("settled", {}))
        began = before.get("began")
        self._goes_on = resume and before.get("state") != "done" and isinstance(began, int)
        self._began = began if self._goes_on else None
        self._write("running")

    def since(self, mark: int) -> int | None:
        """The mark of the record store when the run began if it is gone on with; None if it begins now, at `mark`."""
        if self._goes_on:
            return self._began
        self._began = mark
        self._write("running")
        return None

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

    def _content(self, state: str) -> dict[str, Any]:
        return {
            **self._about,
            "options": self._options,
            "began": self._began,
            "settled": self._settled,
            "state": state,
        }

    def _write(self, state: str) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._content(state), indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            why = f"cannot write {self._path}: {error.strerror}"
            raise LayoutSearchError(f"--out: {why}; name another folder") from None
