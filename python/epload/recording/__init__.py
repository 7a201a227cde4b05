"""Records what an engine's own ``load_weights`` does with a checkpoint, as data."""

from epload.recording.recording import Fill, Recording, Whole, record
from epload.recording.tracing import LoadWeights

__all__ = ["Fill", "LoadWeights", "Recording", "Whole", "record"]
