"""Wrong allocators."""
