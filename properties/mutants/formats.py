"""Wrong bytes."""
