"""One process a rank: the pool behind gloo."""
