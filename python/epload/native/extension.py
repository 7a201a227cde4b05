"""The extension module: build information, the bucket planner, the schedule, and fast access to many dicts, slots and tensors."""

REBUILD = "pip install --force-reinstall --no-deps . (in epload's source folder)"

try:
    from epload import _C as _C
except ImportError as error:
    raise ImportError(f"epload's native part is missing or does not load ({error}). Build it: {REBUILD}") from error
