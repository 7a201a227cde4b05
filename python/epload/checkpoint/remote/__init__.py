"""Checkpoints that are not on this machine: on the Hugging Face Hub, in object storage."""
