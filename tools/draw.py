"""Draws the pictures of docs/how-mla-works.md as SVG: `python -m tools.draw`.

Coordinates are written by hand; a text that would overflow its box raises an error.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
STYLE = """
    text { font-family: Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 14px }
    text { fill: #24303c }
    .title { font-size: 17px; font-weight: bold }
    .bold { font-weight: bold }
    .note { fill: #566573; font-style: italic }
    .small { font-size: 12px }
    .arrow { stroke: #44525f; stroke-width: 1.6; fill: none; marker-end: url(#head) }
    .line { stroke: #6b7a89; stroke-width: 1.3; fill: none }
"""
BLUE, GREEN, YELLOW, PURPLE, RED = "#e8f0fa", "#e4f3e6", "#fdf0d5", "#e4dff3", "#f8dcd8"
WHITE, GREY, DARK = "#ffffff", "#eff1f3", "#9aa7b4"
RANKS = ("#cfe0f5", "#cdeacf", "#fbe2ae", "#ddd2f0")


class Picture:
    """An SVG with a title, to which shapes and texts are added."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.width = name, width
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
            f'  <title id="title">{escape(title)}</title>',
            f"  <style>{STYLE}  </style>",
            '  <defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="#44525f"/></marker>'
            "</defs>",
            f'  <rect width="{width}" height="{height}" fill="#fcfcfc"/>',
        ]

    def rect(self, x: float, y: float, w: float, h: float, fill: str = WHITE, rx: int = 4) -> None:
        self.parts.append(
            f'  <rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{rx}" fill="{fill}" '
            'stroke="#6b7a89" stroke-width="1.2"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        size = 17 if "title" in kind else 12 if "small" in kind else 14
        wide = len(text) * size * (0.63 if "bold" in kind or "title" in kind else 0.57)
        left = x - wide / 2 if anchor == "middle" else x - wide if anchor == "end" else x
        if left < 0 or left + wide > self.width:
            raise ValueError(f"{self.name}: {text!r} leaves the picture")
        self.parts.append(
            f'  <text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, *lines: str, fill: str = WHITE) -> None:
        """A rectangle with centered lines, the first one bold."""
        self.rect(x, y, w, h, fill)
        first = y + h / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            kind = "bold" if number == 0 else "small"
            wide = len(line) * (14 * 0.63 if number == 0 else 12 * 0.57)
            if wide > w:
                raise ValueError(f"{self.name}: {line!r} does not fit {w}")
            self.text(x + w / 2, first + 18 * number, line, kind, "middle")

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'  <path class="arrow" d="M{path}"/>')

    def line(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'  <path class="line" d="M{path}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def two_forms() -> Picture:
    p = Picture("two-forms", "Attention in two forms: expanded and absorbed", 900, 470)
    p.rect(16, 16, 426, 438, GREY, 8)
    p.rect(458, 16, 426, 438, GREY, 8)
    p.text(32, 44, "Expanded: for prefill", "title")
    p.text(474, 44, "Absorbed: for decode", "title")
    p.text(32, 66, "compute keys and values of every head, then attend", "note")
    p.text(474, 66, "attend to the cached rows directly", "note")

    p.box(32, 84, 180, 50, "cached rows", "[S, 576], all heads share", fill=PURPLE)
    p.box(32, 170, 180, 50, "kv_b_proj", "w_uk and w_uv", fill=YELLOW)
    p.arrow((122, 134), (122, 168))
    for shift in (12, 6, 0):
        p.rect(32 + shift, 262 - shift, 180, 62, WHITE)
    p.box(32, 262, 180, 62, "K and V", "[S, 128 heads, 192 + 128]", fill=WHITE)
    p.arrow((122, 220), (122, 248))
    p.box(250, 170, 176, 50, "queries", "[T, 128 heads, 192]", fill=BLUE)
    p.box(250, 262, 176, 62, "attention", "head by head", fill=GREEN)
    p.arrow((338, 220), (338, 260))
    p.arrow((224, 293), (248, 293))
    p.box(250, 356, 176, 42, "output", "[T, 128 heads, 128]", fill=BLUE)
    p.arrow((338, 324), (338, 354))
    p.text(32, 420, "640 FLOPs per query, key and head,", "small")
    p.text(32, 438, "plus 262,144 per key and head to expand", "small")

    p.box(474, 84, 180, 50, "cached rows", "[S, 576], all heads share", fill=PURPLE)
    p.box(692, 84, 176, 50, "queries", "[T, 128 heads, 192]", fill=BLUE)
    p.box(692, 170, 176, 50, "times w_uk", "[T, 128 heads, 576]", fill=YELLOW)
    p.arrow((780, 134), (780, 168))
    p.box(474, 262, 394, 62, "attention", "each row is key and value for all 128 heads", fill=GREEN)
    p.arrow((780, 220), (780, 260))
    p.arrow((564, 134), (564, 260))
    p.text(576, 200, "read once", "note")
    p.box(474, 356, 180, 42, "times w_uv", "[T, 128 heads, 512 to 128]", fill=YELLOW)
    p.arrow((564, 324), (564, 354))
    p.box(692, 356, 176, 42, "output", "[T, 128 heads, 128]", fill=BLUE)
    p.arrow((654, 377), (690, 377))
    p.text(474, 420, "2,176 FLOPs per query, key and head,", "small")
    p.text(474, 438, "plus 262,144 per query and head, by w_uk and w_uv", "small")
    return p


def latent_cache() -> Picture:
    p = Picture("latent-cache", "What is cached per token, and how the cache is paged", 900, 560)
    p.text(24, 38, "DeepSeek-V3, per token and layer: keys and values, or a latent row", "title")
    for number in range(128):
        column, row = number % 32, number // 32
        p.rect(24 + 12 * column, 54 + 15 * row, 10, 13, RED, 1)
    p.text(424, 76, "keys and values of 128 heads, 16 bits", "bold")
    p.text(424, 96, "81,920 bytes")
    p.rect(24, 132, 9, 26, PURPLE, 1)
    p.text(44, 150, "the latent row, 16 bits: 1,152 bytes, 71x smaller", "bold")
    p.rect(24, 174, 9, 14.8, GREEN, 1)
    p.text(44, 186, "the same in fp8_ds_mla: 656 bytes", "bold")
    p.text(424, 118, "(areas to scale)", "note small")

    p.text(24, 238, "One row", "title")
    p.box(24, 254, 512, 44, "latent kv_c, 512 values", "normalized; key and value", fill=PURPLE)
    p.box(536, 254, 128, 44, "k_pe, 64", "rotated", fill=YELLOW)
    p.text(684, 281, "one row serves all heads", "note")

    p.text(24, 346, "Blocks of 64 rows", "title")
    p.text(24, 378, "request A: 150 tokens")
    p.text(24, 462, "request B: 90 tokens,")
    p.text(24, 480, "64 shared with A")
    for y, blocks in ((360, (3, 0, 5)), (450, (3, 6))):
        for column, block in enumerate(blocks):
            p.rect(230 + 44 * column, y, 44, 32, BLUE, 1)
            p.text(252 + 44 * column, y + 21, str(block), "bold", "middle")
    p.text(230, 420, "block tables: the blocks of", "note small")
    p.text(230, 436, "tokens 0-63, 64-127, ...", "note small")
    owners = {0: "A", 3: "A, B", 5: "A", 6: "B"}
    for block in range(8):
        x, y = 470 + 102 * (block % 4), 360 + 84 * (block // 4)
        used = owners.get(block)
        p.box(x, y, 90, 64, f"block {block}", used or "free", fill=PURPLE if used else WHITE)
    p.arrow((362, 376), (462, 376))
    p.arrow((318, 466), (462, 476))
    p.text(
        24,
        540,
        "A shared prefix is stored once; requests grow block by block.",
        "note",
    )
    return p


def sparse_step() -> Picture:
    p = Picture("sparse-step", "A decode step of a sparse model", 900, 470)
    p.text(24, 36, "A sparse step: score every key cheaply, attend to the top K", "title")
    scores = [9, 4, 30, 6, 12, 3, 26, 8, 5, 33, 7, 2, 10, 29, 4, 6, 22, 5, 9, 27, 3, 8, 31, 24]
    chosen = {i for i, score in enumerate(scores) if score > 20}
    left, step = 210, 27
    p.text(24, 76, "1. indexer keys", "bold")
    p.text(24, 95, "132 bytes per token", "small note")
    p.text(24, 150, "2. scores", "bold")
    p.text(24, 169, "index_logits", "small note")
    p.text(24, 222, "3. top K", "bold")
    p.text(24, 241, "index_topk; K = 2048", "small note")
    p.text(24, 300, "4. latent rows", "bold")
    p.text(24, 319, "576 values per token", "small note")
    for number, score in enumerate(scores):
        x = left + step * number
        best = number in chosen
        p.rect(x, 64, 20, 26, YELLOW, 2)
        p.rect(x, 178 - 2 * score, 20, 2 * score, GREEN if best else GREY, 1)
        p.rect(x, 284, 20, 44, PURPLE if best else WHITE, 2)
        if best:
            p.arrow((x + 10, 184), (x + 10, 280))
    p.line((left - 6, 178), (left + step * 24, 178))
    p.box(left + 40, 372, 240, 62, "mqa_sparse", "reads the K rows only", fill=GREEN)
    p.box(left + 370, 372, 180, 62, "output", "same shape as dense", fill=BLUE)
    p.box(24, 372, 150, 62, "query", "all heads, latent", fill=BLUE)
    p.arrow((174, 403), (left + 38, 403))
    p.arrow((left + 280, 403), (left + 368, 403))
    p.arrow((left + 160, 334), (left + 160, 370))
    p.text(left + 172, 356, "rows addressed by slot, read in place", "note small")
    return p


def v4() -> Picture:
    p = Picture("v4", "DeepSeek V4: a window of raw rows, and pooled entries", 900, 470)
    p.text(
        24, 36, "DeepSeek V4: raw rows for recent tokens, pooled entries for older ones", "title"
    )
    left, wide, count = 150, 20, 36
    p.text(24, 78, "tokens", "bold")
    for number in range(count):
        inside = number >= count - 8
        p.rect(left + wide * number, 62, wide - 4, 26, PURPLE if inside else GREY, 2)
    end = left + wide * count
    p.text(end - 4, 52, "window: the last 128 raw rows", "small", "end")

    p.text(24, 176, "entries,", "bold")
    p.text(24, 194, "ratio 4", "bold")
    picked = {1, 4, 6}
    for number in range(count // 4):
        x = left + 4 * wide * number
        p.line((x, 92), (x + 30, 150))
        p.line((x + 4 * wide - 4, 92), (x + 46, 150))
        p.rect(x + 28, 152, 20, 44, GREEN if number in picked else WHITE, 2)
    p.text(
        left,
        220,
        "every 4 tokens are pooled into one entry; an indexer selects the top K (green)",
        "small",
    )

    p.text(24, 268, "entries,", "bold")
    p.text(24, 286, "ratio 128", "bold")
    for x in (left + 120, left + 440):
        p.rect(x, 244, 20, 44, GREEN, 2)
    p.text(left + 160, 272, "one per 128 tokens", "small")
    p.text(left + 480, 272, "all are attended to", "small")
    p.text(left, 310, "(a layer has ratio 4, ratio 128, or only a window)", "note small")

    p.box(24, 350, 130, 76, "query", "all heads", fill=BLUE)
    p.box(
        230,
        350,
        300,
        76,
        "mqa_sparse",
        "window and entries in one softmax,",
        "with a sink per head",
        fill=GREEN,
    )
    p.box(606, 350, 264, 76, "output", "rotated back, then projected", fill=BLUE)
    p.arrow((154, 388), (228, 388))
    p.arrow((530, 388), (604, 388))
    p.text(
        24,
        452,
        "584 bytes per entry; V4-Flash caches 3.8 KiB per token of context over all layers.",
        "note",
    )
    return p


def ranks() -> Picture:
    p = Picture("ranks", "Context parallelism: one cache over four ranks", 900, 500)
    p.text(24, 36, "Context parallelism: each rank holds a quarter of the keys", "title")
    p.text(24, 80, "positions", "bold")
    for number in range(24):
        x = 130 + 31 * number
        p.rect(x, 60, 28, 30, RANKS[number % 4], 2)
        p.text(x + 14, 80, str(number), "small", "middle")
    p.text(130, 112, "position g is on rank g mod 4 (or in longer runs)", "note small")
    for rank in range(4):
        x = 24 + 219 * rank
        p.rect(x, 136, 196, 216, "#f6f7f8", 8)
        p.text(x + 98, 160, f"rank {rank}", "bold", "middle")
        for number in range(6):
            p.rect(x + 14 + 28 * number, 174, 26, 28, RANKS[rank], 2)
            p.text(x + 27 + 28 * number, 193, str(rank + 4 * number), "small", "middle")
        p.box(x + 14, 232, 168, 46, "attention", "over its own keys", fill=GREEN)
        p.arrow((x + 98, 204), (x + 98, 230))
        p.box(x + 14, 300, 168, 40, "(out, lse)", fill=BLUE)
        p.arrow((x + 98, 278), (x + 98, 298))
        p.arrow((x + 98, 352), (x + 98, 392))
    p.box(
        24,
        394,
        853,
        50,
        "merge_over_ranks",
        "out, weighted by exp(lse): exact for any distribution of keys",
        fill=YELLOW,
    )
    p.text(
        24,
        476,
        "The cache stays in place; outputs and lse are sent. Four ranks hold 4x as many tokens.",
        "note small",
    )
    return p


PICTURES = (two_forms, latent_cache, sparse_step, v4, ranks)

if __name__ == "__main__":
    for draw in PICTURES:
        picture = draw()
        (IMAGES / f"{picture.name}.svg").write_text(picture.svg())
