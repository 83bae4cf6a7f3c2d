"""What a history is drawn from: services, and the operations that can come next."""
