"""Tests here run as they would from an installed package: :mod:`properties.plugin` has all they need."""

pytest_plugins = ["properties.plugin"]
