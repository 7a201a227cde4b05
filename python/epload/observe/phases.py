"""The phases of an operation."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("plan", "materialize", "read", "inter_node", "intra_node", "unpack", "verify", "wait")
"""The phases of a load or a sync."""


@dataclass
class Phase:
    """Time and bytes of one phase on this rank. Phases of different buckets overlap."""

    seconds: float = 0.0
    """Wall time on the host. For device work, this is the time to queue it and to wait for it where that is unavoidable."""
    nbytes: int = 0
    """Bytes handled in this phase."""
    cpu_seconds: float = 0.0
    """CPU time of epload's Python threads, without gloo's threads and the native threads that read files."""
