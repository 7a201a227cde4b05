"""Loads every class that an Auto class of the installed transformers can make, from a shrunken configuration, and judges it.

    python -m campaigns.census                          # all classes, one at a time
    python -m campaigns.census --workers 4 --results results.json
    python -m campaigns.census Llava FalconH1           # those with one of these in their names

Each class is built normally, saved, and loaded into a model on meta: once all of it, once without a few of its tensors. Every
tensor is then what it was, or what ``from_pretrained`` computes. A class of ``classes.txt`` that stops building is an error;
``--write-list`` writes that file anew. With ``--results`` a census that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from campaigns.census.classes import LIST, auto_classes, listed
from campaigns.census.pool import census


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of names")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a JSON file of verdicts; kept and resumed")
    parser.add_argument("--listed", action="store_true", help="only the classes of classes.txt")
    parser.add_argument("--write-list", action="store_true", help="write classes.txt anew")
    parser.add_argument("--verbose", action="store_true", help="a line for each class")
    options = parser.parse_args()
    names = listed() if options.listed else sorted({*auto_classes(), *(listed() if LIST.exists() else [])})
    if options.only:
        names = [name for name in names if any(part in name for part in options.only)]
    verdicts = census(names, options.workers, options.results, options.verbose)
    by_kind: dict[str, list[str]] = {kind: [] for kind in ("right", "wrong", "raising", "does not build")}
    for name, verdict in verdicts.items():
        by_kind[verdict["kind"]].append(name)
    if options.write_list:
        LIST.write_text("".join(f"{name}\n" for name in sorted(set(names) - set(by_kind["does not build"]))))
    stopped = sorted(set(by_kind["does not build"]) & set(listed())) if LIST.exists() else []
    for kind in ("wrong", "raising"):
        for name in by_kind[kind]:
            print(f"{kind}: {name}: " + "\n    ".join(verdicts[name]["findings"][:3]))
    for name in stopped:
        print(f"stopped building: {name}: {verdicts[name]['findings'][0]}")
    judged = len(names) - len(by_kind["does not build"])
    print(
        f"{judged} judged, {len(by_kind['wrong'])} wrong, {len(by_kind['raising'])} raising, "
        f"{len(by_kind['does not build'])} do not build"
    )
    return 1 if by_kind["wrong"] or by_kind["raising"] or stopped or not judged else 0


if __name__ == "__main__":
    sys.exit(main())
