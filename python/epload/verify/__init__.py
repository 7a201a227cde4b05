"""Checking that a load gave the model what the checkpoint contains, and checking a checkpoint without a model."""
