"""epload with its proof of what the shards hold."""

from peers.epload_modes import MODES as PLAIN
from peers.epload_modes import load

__all__ = ["MODES", "MODE_CASES", "TITLE", "load"]

TITLE = "epload"
MODES = {f"{mode}, verify=True": {**PLAIN[mode], "verify": True} for mode in ("one/two_level", "auto/auto")}
MODE_CASES = dict.fromkeys(MODES, ("reload",)) | {"one/two_level, verify=True": ("reload", "meta")}
