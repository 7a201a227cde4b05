"""The extension module: build information, the bucket planner, and what Python code cannot do as fast with dicts and modules."""

from epload import _C as _C
