"""Numbers: attention over the materialized view (law A)."""
