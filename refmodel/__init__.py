"""What is right: the pure reference of context-parallel shared KV.

No processes, clocks, files or global state.
"""
