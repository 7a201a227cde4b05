"""Nodes, their leaders, and the process groups that follow from them."""
