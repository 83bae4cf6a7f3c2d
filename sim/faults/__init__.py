"""What a run may suffer, injected by name and place into any program, in any world."""
