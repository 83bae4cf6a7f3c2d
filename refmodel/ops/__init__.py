"""Contracts of kernel-sized operations, for kernels that other people write."""
