"""Wrong transfers."""
