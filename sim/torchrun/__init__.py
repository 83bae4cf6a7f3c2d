"""The world that was started: this process is one rank of it, and others are elsewhere."""
