"""What runs: scenario files and traces, worked out into shared metadata and the truth to compare with."""
