"""A forward drawn: who owns, computes and sends what."""
