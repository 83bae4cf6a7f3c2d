"""The references as a target: what is said of right kernels. ``cpkv check properties.kernels.references``."""

from __future__ import annotations

from refmodel.ops.catalogue import OPS

globals().update({name: op.reference for name, op in OPS.items()})
