"""Moves a plan's buckets from the ranks that read to the ranks that keep."""
