"""Wrong trees."""
