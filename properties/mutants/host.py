"""Wrong host caches."""
