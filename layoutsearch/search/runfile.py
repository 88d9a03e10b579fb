"""What a run was about, beside its plan, so that it can be resumed or a mix-up noticed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layoutsearch.errors import LayoutSearchError
from layoutsearch.search.owner import Owner

# What differs where a digest does.
_DIGESTS = {
    "fingerprint": "is of another model or of other input shapes",
    "io_layout": "has another --io-layout",
    "candidates": "has another --space, or other rules",
}
# Options that runs of before there was a choice had by default; of others, what is not written says nothing.
_BEFORE = {"io_layout": None}


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
                options; another run goes on in the folder; or it cannot be written.
        """
        before = self._read()
        self._refuse_a_second_run(before)
        if resume and not before:
            raise LayoutSearchError(
                f"--resume: there is no run in {self._path.parent}; leave --resume away to start one"
            )
        if resume:
            self._refuse_another_run({**_mapping(before, "options"), **{key: before.get(key) for key in self._about}})
        if all(before.get(key) == value for key, value in self._about.items()):
            self._settled = _mapping(before, "settled")
        began = before.get("began")
        self._goes_on = resume and before.get("state") != "done" and isinstance(began, int)
        self._began = began if self._goes_on else None
        self._write("running")

    def _refuse_another_run(self, had: Mapping[str, Any]) -> None:
        remedy = "use another --out, or leave --resume away"
        for key, value in {**self._about, **self._options}.items():
            has = had.get(key, _BEFORE.get(key, value))
            if has != value and key in _DIGESTS:
                raise LayoutSearchError(f"--resume: the run in {self._path.parent} {_DIGESTS[key]}; {remedy}")
            if has != value:
                raise LayoutSearchError(
                    f"--resume: the run in {self._path.parent} has {key} {has!r}, this one {value!r}; {remedy}"
                )

    def _refuse_a_second_run(self, before: Mapping[str, Any]) -> None:
        """Two runs in one folder take each other's plan, and neither could be resumed."""
        owner = Owner.from_json(before.get("owner"))
        here = Owner.current()
        if before.get("state") != "running" or owner is None or owner.host != here.host or owner.pid == here.pid:
            return
        if not owner.dead:
            raise LayoutSearchError(
                f"--out: a run goes on in {self._path.parent} (process {owner.pid}); wait for it, or use another --out"
            )

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
            "owner": Owner.current().to_json(),
        }

    def _write(self, state: str) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._content(state), indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            why = f"cannot write {self._path}: {error.strerror}"
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise LayoutSearchError(f"--out: {why}; name another folder") from None


def _mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within a file that a user may have changed; empty where it is none."""
    found = data.get(key)
    return dict(found) if isinstance(found, dict) else {}
