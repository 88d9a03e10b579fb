"""The errors a user can cause. Each is one line that says what was found, what was expected and what to do next."""

from __future__ import annotations


class LayoutSearchError(Exception):
    """Root of every error raised on purpose. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class ModelError(LayoutSearchError):
    """The model file or module cannot be read, or is not what layoutsearch can tune."""


class SpaceError(LayoutSearchError):
    """A search-space file or a rule is wrong."""


class PlanError(LayoutSearchError):
    """The plan cannot be read, or does not belong to this model or target."""


class MaterializeError(LayoutSearchError):
    """A module could not be brought into the requested layouts."""


class InfeasibleError(MaterializeError):
    """An assignment that has no legal realisation; raised before the conversion, with the reason."""


class ToolchainError(LayoutSearchError):
    """The machine lacks a program that TVM needs."""


class DeviceError(LayoutSearchError):
    """No device answers, or it does not serve the wanted key."""
