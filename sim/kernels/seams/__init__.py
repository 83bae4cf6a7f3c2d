"""Where kernels stand in the whole: for each operation, the places where the reference does the same."""
