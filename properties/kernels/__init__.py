"""The conformance kit: kernels that other people write, tried against the contract of each operation."""
