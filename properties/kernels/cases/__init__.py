"""What operations are tried with: for each, a small value that says it all, and how to draw one."""
