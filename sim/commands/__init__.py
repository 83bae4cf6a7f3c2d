"""The commands of ``cpkv``, one a module. :mod:`sim.cli` imports them when they are called."""
