"""Inference engines whose models have ``load_weights``, for live sync and for loading checkpoints.

Each engine's model is filled as its own ``load_weights`` would fill it. That runs once on tensors without data, and what it does
with them is recorded: the regions that it copies are then written where they belong, and nothing else is read or received.
"""

from epload.integrations.engine.loading import load_engine
from epload.integrations.engine.model import EngineModel

__all__ = ["EngineModel", "load_engine"]
