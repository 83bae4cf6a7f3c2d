"""What happens to requests over time, as data: a history is a scenario of operations instead of forwards."""
