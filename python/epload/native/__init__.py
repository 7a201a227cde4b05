"""The native library: typed wrappers of its ops, and what this build has."""
