"""Proof that a load gave the model what the checkpoint says."""
