"""Schedule templates: what a fused kernel computes goes in, a parallel vectorised kernel comes out."""

from layoutsearch.schedule.audit import audit
from layoutsearch.schedule.builder import BUILD_CONFIG
from layoutsearch.schedule.dispatch import apply, candidates, default
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.schedule.value import TEMPLATES, Schedule, ScheduleError, TemplateSpec

__all__ = [
    "BUILD_CONFIG",
    "TEMPLATES",
    "Schedule",
    "ScheduleError",
    "TargetInfo",
    "TemplateSpec",
    "apply",
    "audit",
    "candidates",
    "default",
]
