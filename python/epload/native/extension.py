"""The extension module: build information, the bucket planner, the schedule, and fast access to many dicts, slots and tensors."""

from epload import _C as _C
