"""What an engine's own ``load_weights`` does with a checkpoint, as data."""

from epload.recording.recording import Fill, Recording, Whole, record

__all__ = ["Fill", "Recording", "Whole", "record"]
