"""A small DeepSeek-style layer stack: MLA and indexer, sizes as parameters, weights from a seed."""
