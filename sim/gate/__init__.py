"""Cases on worlds, with verdicts."""
