"""Types and arithmetic that everything else is made of."""
