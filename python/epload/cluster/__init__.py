"""The node topology: the ranks of each node, the rank that leads it, and the process groups that follow from it."""
