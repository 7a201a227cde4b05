"""epload with bucket checksums or shard verification."""

from peers.epload_modes import MODES as PLAIN
from peers.epload_modes import load

__all__ = ["MODES", "MODE_CASES", "TITLE", "load"]

TITLE = "epload"
MODES = {
    f"{mode}, verify={verify}": {**PLAIN[mode], "verify": verify}
    for mode in ("one/two_level", "auto/auto")
    for verify in ("buckets", "sample", "full")
}
MODE_CASES = dict.fromkeys(MODES, ("reload",)) | {"one/two_level, verify=full": ("reload", "meta")}
