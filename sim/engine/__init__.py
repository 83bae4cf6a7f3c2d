"""A small serving engine as a rank program, and the truth it is compared with."""
