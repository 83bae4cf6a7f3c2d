"""Wrong kernels of the operations in :mod:`refmodel.ops.layout`."""
