"""Tests of this repository run as they would from an installed package: :mod:`properties.plugin` has it all."""

pytest_plugins = ["properties.plugin"]
