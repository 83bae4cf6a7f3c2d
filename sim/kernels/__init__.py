"""Kernels that other people write: how they are found, and how they take the place of the reference."""
