"""Sources of weights behind one interface: files of several formats, over a byte store, and state dicts."""
