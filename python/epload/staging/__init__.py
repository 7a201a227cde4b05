"""Memory that a load's bytes pass through."""
