"""What a model wants filled, and what it computes itself."""
