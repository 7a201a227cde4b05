"""The model side of a load: what is to be filled, where it gets storage, and what the model initializes itself."""
