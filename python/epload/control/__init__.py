"""Agreement between ranks, and how each hears that another failed."""
