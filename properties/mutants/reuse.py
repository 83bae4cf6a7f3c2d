"""Views wrongly put together from history and current rows."""
