"""Where rank programs run, and what can go wrong between ranks."""
