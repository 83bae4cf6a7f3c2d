"""Hypothesis profiles for this repository. Options, markers and worlds come from :mod:`properties.plugin`."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["properties.plugin"]

# Tests run on all cores already (xdist); threads of torch on top only get in each other's way.
torch.set_num_threads(1)

# Hypothesis would load its own profile where CI is set: the same 100 examples for ever, nothing saved.
settings.register_profile("dev", deadline=None, max_examples=60)
settings.register_profile(
    "ci", deadline=None, max_examples=150, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
