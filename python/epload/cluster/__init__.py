"""Which ranks run on which node, which rank leads each node, and the process groups that follow from it."""
