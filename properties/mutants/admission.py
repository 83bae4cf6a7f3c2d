"""Wrong admissions and settings that should have been refused."""
