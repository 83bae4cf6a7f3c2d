"""What must always hold: properties, exhaustive checks and mutants, one family of laws a module."""
