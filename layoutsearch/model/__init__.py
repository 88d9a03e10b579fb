"""From a model file to the canonical module."""

from layoutsearch.model.canonicalize import canonicalize
from layoutsearch.model.fingerprint import fingerprint, op_ids
from layoutsearch.model.kinds import kind_of
from layoutsearch.model.load import LoadedModel, ModelInput, ModelOutput, load, parse_shapes

__all__ = [
    "LoadedModel",
    "ModelInput",
    "ModelOutput",
    "canonicalize",
    "fingerprint",
    "kind_of",
    "load",
    "op_ids",
    "parse_shapes",
]
