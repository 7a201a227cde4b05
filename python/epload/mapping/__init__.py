"""From checkpoint names and layouts to regions of a model's tensors."""
