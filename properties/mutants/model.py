"""Wrong positions and selections in the forward of a model."""
