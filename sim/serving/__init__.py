"""The rank program, and what it checks on the way."""
