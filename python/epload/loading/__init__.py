"""One load, from opening the checkpoint to the agreed plan."""
