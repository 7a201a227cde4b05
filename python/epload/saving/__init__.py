"""Writes the tensors of a sharded model to a checkpoint: each rank its own parts, in the layout of ``save_pretrained``."""
