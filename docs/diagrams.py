"""Draws docs/images/*.svg, how a byte travels in each mode: python docs/diagrams.py. The colors suit light and dark pages."""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
SHARDS = ("#3f7fd0", "#2f9e68", "#d07a1f", "#b04fa8")
"""By the rank that keeps the bytes."""
LINE, TEXT = "#8a93a3", "#7b8494"
WIDTH, NODE_WIDTH, NODE_TOP = 420, 198, 98
BUFFER, RANK, BAR = NODE_TOP + 14, NODE_TOP + 82, 26
SEGMENT = 44


def text(x: float, y: float, content: str, color: str = TEXT, size: int = 13, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{content}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "none", dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{LINE}"{dash}/>'


def arrow(x0: float, y0: float, x1: float, y1: float, color: str = LINE, width: float = 2) -> str:
    return (
        f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{color}" stroke-width="{width:g}" '
        f'marker-end="url(#{color[1:]})"/>'
    )


def shards(x: float, y: float, segment: float, height: float) -> str:
    """A bar with the bytes of each rank."""
    return "".join(box(x + i * segment, y, segment, height, color) for i, color in enumerate(SHARDS))


def node_x(node: int) -> float:
    return 4 + node * (WIDTH - NODE_WIDTH - 8)


def rank_x(rank: int) -> float:
    return node_x(rank // 2) + 8 + (rank % 2) * 94


def buffer_x(node: int) -> float:
    return node_x(node) + (NODE_WIDTH - 4 * SEGMENT) / 2


def nodes(buffers: bool) -> list[str]:
    """Two nodes of two ranks; with buffers, what arrives in a node is unpacked from shared memory."""
    parts = []
    for node in range(2):
        parts.append(box(node_x(node), NODE_TOP, NODE_WIDTH, 152, dashed=True))
        label = f"node {node}: shared buffer, ranks" if buffers else f"node {node}"
        parts.append(text(node_x(node) + NODE_WIDTH / 2, NODE_TOP + 144, label))
        if buffers:
            parts.append(shards(buffer_x(node), BUFFER, SEGMENT, 20))
    for rank, color in enumerate(SHARDS):
        parts.append(box(rank_x(rank), RANK, 88, 40, color))
        parts.append(text(rank_x(rank) + 44, RANK + 25, f"rank {rank}", "#ffffff", 14))
        if buffers:
            parts.append(arrow(buffer_x(rank // 2) + (rank + 0.5) * SEGMENT, BUFFER + 21, rank_x(rank) + 44, RANK - 3, color))
    return parts


def checkpoint(label: str = "checkpoint") -> list[str]:
    return [shards(60, 22, 75, BAR), text(WIDTH / 2, 14, label)]


def trainer() -> list[str]:
    """One shard of the weights on each rank of another job."""
    parts = [box(44, 2, 332, 62, dashed=True), text(WIDTH / 2, 17, "trainer, one shard on each rank")]
    return [*parts, *(box(60 + 75 * i, 26, 70, 28, color) for i, color in enumerate(SHARDS))]


def between_nodes(both_ways: bool) -> list[str]:
    left, right = buffer_x(0) + 4 * SEGMENT + 2, buffer_x(1) - 4
    if not both_ways:
        return [arrow(left, BUFFER + 10, right, BUFFER + 10, width=3)]
    return [
        arrow(left, BUFFER + 5, right, BUFFER + 5, width=3),
        arrow(right + 2, BUFFER + 16, left + 2, BUFFER + 16, width=3),
    ]


def read(segment: int, node: int, color: str) -> str:
    return arrow(60 + 75 * segment + 37, 50, buffer_x(node) + (segment + 0.5) * SEGMENT, BUFFER - 3, color)


def whole(node: int) -> str:
    return arrow(WIDTH / 2 + (60 if node else -60), 50, buffer_x(node) + 2 * SEGMENT, BUFFER - 4, width=4)


def label(x: float, y: float, width: float, title: str, *lines: str, color: str = "none") -> list[str]:
    """A box with a title and smaller lines in it."""
    height = 28 + 15 * len(lines)
    parts = [box(x, y, width, height, color), text(x + width / 2, y + 18, title, size=14)]
    return [*parts, *(text(x + width / 2, y + 34 + 15 * i, line, size=11) for i, line in enumerate(lines))]


def architecture() -> list[str]:
    """Draws the way from a checkpoint and a model to filled shards."""
    read, move, unpack, color = 8, 151, 294, SHARDS[0]
    return [
        *label(8, 4, 118, "checkpoint", "names and shapes"),
        *label(294, 4, 118, "model", "each rank's regions"),
        *label(151, 40, 118, "plan", "what goes where"),
        arrow(126, 26, 151, 52),
        arrow(294, 26, 269, 52),
        text(WIDTH / 2, 104, "all ranks agree, then", size=11),
        arrow(WIDTH / 2, 110, WIDTH / 2, 126),
        *label(read, 128, 118, "read", "files, objects, a dict"),
        *label(move, 128, 118, "move", "from rank to rank"),
        *label(unpack, 128, 118, "unpack", "one native call"),
        arrow(67, 47, 67, 126, color, 3),
        arrow(126, 150, 151, 150, color, 3),
        arrow(269, 150, 294, 150, color, 3),
        text(138, 188, "buckets", size=11),
        text(281, 188, "buckets", size=11),
        arrow(353, 171, 353, 206, color, 3),
        *label(unpack, 208, 118, "local shards"),
        text(140, 220, "with readers=every, each rank", size=11),
        text(140, 235, "reads straight into its shards", size=11),
    ]


def pictures() -> dict[str, list[str]]:
    own = [arrow(60 + 75 * i + 37, 50, rank_x(i) + 44, RANK - 3, color) for i, color in enumerate(SHARDS)]
    turns = [read(i, i // 2, color) for i, color in enumerate(SHARDS)]
    sent = [arrow(60 + 75 * i + 35, 56, buffer_x(0) + (i + 0.5) * SEGMENT, BUFFER - 3, c) for i, c in enumerate(SHARDS)]
    return {
        "architecture": architecture(),
        "every": [*checkpoint(), *nodes(buffers=False), *own],
        "per_node": [*checkpoint(), *nodes(buffers=True), whole(0), whole(1)],
        "partitioned": [*checkpoint(), *nodes(buffers=True), *turns, *between_nodes(both_ways=True)],
        "one": [*checkpoint(), *nodes(buffers=True), whole(0), *between_nodes(both_ways=False)],
        "sync": [*trainer(), *nodes(buffers=True), *sent, *between_nodes(both_ways=False)],
    }


def svg(parts: list[str]) -> str:
    heads = "".join(
        f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for color in (*SHARDS, LINE)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 254" width="{WIDTH}" height="254" '
        f'font-family="system-ui, sans-serif"><defs>{heads}</defs>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    for name, parts in pictures().items():
        (IMAGES / f"{name}.svg").write_text(svg(parts))
