"""Bytes of one rank and the full view of all of them (law V)."""
