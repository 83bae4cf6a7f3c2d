"""Pure index algebra: pages and extents, plans, ownership and remap (laws S, O)."""
