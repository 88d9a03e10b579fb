"""`layoutsearch device`: what a device can do at most."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table

from layoutsearch.errors import LayoutSearchError

if TYPE_CHECKING:
    from layoutsearch.measure.device import Device
    from layoutsearch.measure.profile import DeviceProfile

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def device() -> None:
    """What a device can do at most: measured once, then the ground of lower bounds and predictions."""


def _options(command: _Command) -> _Command:
    for option in reversed(
        (
            click.option("--rpc", metavar="HOST:PORT", help="TVM RPC tracker; a server on this machine by default."),
            click.option("--device-key", metavar="KEY", help="Device key at the tracker."),
            click.option("--threads", type=click.IntRange(1), help="Threads of a kernel; all cores by default."),
            click.option(
                "--target", metavar="TARGET", help="TVM target that kernels are built for; this CPU by default."
            ),
            click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
        )
    ):
        command = option(command)
    return command


@device.command()
@_options
def calibrate(target: str | None, as_json: bool, **where: Any) -> None:
    """Measure a device's peaks and keep them with its identity; takes about 20 s on an idle device."""
    from layoutsearch.cli.options import parse_target
    from layoutsearch.measure.calibrate import calibrate as measure
    from layoutsearch.measure.calibrate import doubt
    from layoutsearch.measure.profile import ProfileStore
    from layoutsearch.targets import as_target
    from layoutsearch.toolchain import require_toolchain

    built_for = as_target(parse_target(target))
    require_toolchain(built_for)
    with _opened(**where) as opened, Console(stderr=True).status("starting") as status:
        profile = measure(opened, built_for, status.update)
        path = ProfileStore().save(profile, opened.identity())
    _print(profile, as_json)
    if not as_json:
        click.echo(f"kept in {path}")
    if profile.is_doubtful:
        click.echo(f"warning: {doubt(profile)}; calibrate again when it is idle", err=True)


@device.command()
@_options
def show(target: str | None, as_json: bool, **where: Any) -> None:
    """Print the stored peaks of a device."""
    from layoutsearch.cli.options import parse_target
    from layoutsearch.measure.calibrate import target_text
    from layoutsearch.measure.profile import ProfileStore

    about = target_text(parse_target(target))
    with _opened(**where) as opened:
        identity = opened.identity()
    profile = ProfileStore().load(identity, about)
    if profile is None:
        raise LayoutSearchError(
            f"device {identity.key!r} ({identity.cpu}) is not calibrated for {identity.threads} threads and this "
            "target: run layoutsearch device calibrate with the same options"
        )
    _print(profile, as_json)


@contextmanager
def _opened(rpc: str | None, device_key: str | None, threads: int | None) -> Iterator[Device]:
    from layoutsearch.measure.device import Device
    from layoutsearch.targets import default_threads

    if bool(rpc) != bool(device_key):
        raise LayoutSearchError("--rpc HOST:PORT and --device-key KEY go together; give both or neither")
    count = threads or default_threads()
    with Device.remote(rpc, device_key, count) if rpc and device_key else Device.local(count) as opened:
        yield opened


def _print(profile: DeviceProfile, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(profile.to_json()))
        return
    click.echo(f"{profile.key}: {profile.cpu}, {profile.threads} threads, {profile.created}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    peaks = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("peak", "GFLOP/s", "one thread"):
        peaks.add_column(heading, justify="left" if heading == "peak" else "right")
    for dtype, rate in profile.peak_gflops.items():
        peaks.add_row(dtype, f"{rate:.1f}", f"{profile.one_thread_gflops.get(dtype, 0.0):.1f}")
    levels = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("level", "KiB", "GB/s"):
        levels.add_column(heading, justify="left" if heading == "level" else "right")
    for level in profile.levels:
        levels.add_row(level.name, f"{level.bytes >> 10}" if level.bytes else "", f"{level.gb_s:.1f}")
    console.print(peaks)
    console.print(levels)
    click.echo(f"a parallel call {profile.call_us:.2f} us, the least call {profile.least_call_us:.2f} us")
