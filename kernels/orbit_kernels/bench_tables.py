"""The tables of docs/benchmarks.md from the rows of bench.py: a test holds the document to its data. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

NAMES = {
    "kimi-k2.6": "Kimi-K2.6", "v4-flash": "V4-Flash", "v4-pro": "V4-Pro", "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "kimi-k2.6-ep8": "Kimi, 1 of 8 expert-parallel ranks", "kimi-k2.6-tp8": "Kimi, 1 of 8 tensor-parallel ranks",
}  # fmt: skip
DECODE_FIRST = ("chunked", "eager chunks", "loop over experts", "bitsandbytes-like")
ADAPTERS = {"layer none": "none", "layer oft32": "OFT, block 32", "layer lora16": "LoRA, rank 16"}
ENGINES = {"kernels": "ours", "sglang marlin": "Marlin", "sglang triton": "Triton"}

Rows = dict[tuple, dict]
"""Rows by (shape, format, tokens, path, pass, graph)."""


def tables(data: dict) -> str:
    """All tables of a file of bench.py, as Markdown, each without a caption and parted by an empty line."""
    rows: Rows = {
        (row["shape"], row["format"], row["tokens"], row["path"], row["pass"], row["graph"]): row
        for row in data["rows"]
    }
    blocks = [_products(rows), _decode_first(rows), *_layers(rows), _prefill(rows), _decoding(rows)]
    return "\n\n".join(block for block in blocks if block)


def _products(rows: Rows) -> str:
    lines = []
    for shape, fmt, tokens in _sizes(rows, "bf16 resident", False):
        resident, ours = (_both(rows, shape, fmt, tokens, path) for path in ("bf16 resident", "kernels"))
        if not resident or not ours:
            continue
        total = sum(row["ms"] for row in ours)
        share = sum(row["bandwidth_share"] * row["ms"] for row in ours) / total
        rate = sum(row["tflops"] * row["ms"] for row in ours) / total
        lines.append([
            _label(shape, fmt), f"{tokens:,}", " + ".join(_ms(row["ms"]) for row in resident), _ms(ours[0]["ms"]),
            _ms(ours[1]["ms"]), f"{total / sum(row['ms'] for row in resident):.2f}", f"{rate:.0f}", f"{share:.0%}",
            _bytes(max(row["transient_bytes"] for row in ours)),
        ])  # fmt: skip
    head = "shape, format | tokens | BF16 resident | kernels forward | kernels gradient | ratio | TFLOP/s"
    return _table(f"{head} | of the bandwidth | weight transient", lines)


def _decode_first(rows: Rows) -> str:
    """Both passes together: milliseconds, ratio, transient."""
    lines = []
    for shape, fmt, tokens in _sizes(rows, "chunked", False):
        resident = sum(row["ms"] for row in _both(rows, shape, fmt, tokens, "bf16 resident"))
        ours = sum(row["ms"] for row in _both(rows, shape, fmt, tokens, "kernels"))
        cells = []
        for path in DECODE_FIRST:
            pair = _both(rows, shape, fmt, tokens, path)
            ms, spare = sum(row["ms"] for row in pair), max((row["transient_bytes"] for row in pair), default=0)
            cells.append(f"{_ms(ms)}, {ms / resident:.2f} ({_bytes(spare)})" if pair else "")
        lines.append([_label(shape, fmt), f"{tokens:,}", f"{_ms(ours)}, {ours / resident:.2f}", *cells])
    head = "shape, format | tokens | kernels | chunks of 1 GiB | eager chunks | loop over experts | like bitsandbytes"
    return _table(head, lines)


def _layers(rows: Rows) -> list[str]:
    """One table a layer: milliseconds, ratio to the kernels' products, ratio to BF16's in brackets."""
    found = []
    for shape, fmt in _unique((s, f) for s, f, _ in _sizes(rows, "layer none", False)):
        sizes = [t for s, f, t in _sizes(rows, "layer none", False) if (s, f) == (shape, fmt)]
        lines = []
        for path, name in ADAPTERS.items():
            cells = []
            for tokens in sizes:
                row = rows.get((shape, fmt, tokens, path, "layer", False))
                ours = rows.get((shape, fmt, tokens, "kernels", "products", False))
                ratio = row["ms"] / ours["ms"] if row and ours else 0
                cells.append(f"{_ms(row['ms'])}, {ratio:.2f} ({row['ratio_bf16']:.2f})" if ratio else "")
            lines.append([name, *cells])
        alone = [rows.get((shape, fmt, tokens, "kernels", "products", False)) for tokens in sizes]
        cells = [f"{_ms(row['ms'])} ({row['ratio_bf16']:.2f})" if row else "" for row in alone]
        lines.append(["the products alone", *cells])
        found.append(_table(f"{_label(shape, fmt)}, adapter | " + " | ".join(f"{t:,}" for t in sizes), lines))
    return found


def _prefill(rows: Rows) -> str:
    """Milliseconds of an engine's MLP at training sizes, and ours over the faster of SGLang's."""
    lines = []
    for shape, fmt, tokens in _unique((k[0], k[1], k[2]) for k in rows if k[4] == "mlp" and not k[5]):
        found = {path: rows.get((shape, fmt, tokens, path, "mlp", False)) for path in ENGINES}
        others = [row["ms"] for path, row in found.items() if row and path != "kernels"]
        if found["kernels"] and others:
            cells = [_ms(row["ms"]) if row else "" for row in found.values()]
            lines.append([_label(shape, fmt), f"{tokens:,}", *cells, f"{found['kernels']['ms'] / min(others):.2f}"])
    return _table("shape, format | tokens | " + " | ".join(ENGINES.values()) + " | ours / the faster", lines)


def _decoding(rows: Rows) -> str:
    """Microseconds of a graph's replay."""
    sizes = sorted({key[2] for key in rows if key[5]})
    lines = []
    for shape, fmt in _unique((key[0], key[1]) for key in rows if key[5]):
        for what, path, pass_ in (
            ("products: BF16 resident", "bf16 resident", "forward"),
            ("products: ours", "kernels", "forward"),
            *((f"MLP: {name}", path, "mlp") for path, name in ENGINES.items()),
        ):
            found = [rows.get((shape, fmt, tokens, path, pass_, True)) for tokens in sizes]
            if any(found):
                cells = [f"{row['ms'] * 1e3:,.0f}" if row else "" for row in found]
                lines.append([_label(shape, fmt), what, *cells])
        for name, path in (("Marlin", "sglang marlin"), ("Triton", "sglang triton")):
            pairs = [[rows.get((shape, fmt, t, own, "mlp", True)) for own in ("kernels", path)] for t in sizes]
            if any(all(pair) for pair in pairs):
                cells = [f"{pair[0]['ms'] / pair[1]['ms']:.2f}" if all(pair) else "" for pair in pairs]
                lines.append([_label(shape, fmt), f"MLP: ours / {name}", *cells])
    return _table("shape, format | microseconds | " + " | ".join(f"{t:,}" for t in sizes), lines)


def _both(rows: Rows, shape: str, fmt: str, tokens: int, path: str) -> list[dict]:
    """The rows of forward and gradient, or none."""
    pair = [rows.get((shape, fmt, tokens, path, pass_, False)) for pass_ in ("forward", "gradient")]
    return [row for row in pair if row] if all(pair) else []


def _sizes(rows: Rows, path: str, graph: bool) -> list[tuple[str, str, int]]:
    return _unique((key[0], key[1], key[2]) for key in rows if key[3] == path and key[5] == graph)


def _unique(found: Iterable[tuple]) -> list[tuple]:
    return list(dict.fromkeys(found))


def _table(head: str, lines: list[list[str]]) -> str:
    """Cells of the first column are left empty where they repeat."""
    if not lines:
        return ""
    written, last = [f"| {head} |", "| " + " | ".join("---" for _ in head.split(" | ")) + " |"], None
    for first, *rest in lines:
        written.append("| " + " | ".join(["" if first == last else first, *rest]) + " |")
        last = first
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in written)


def _label(shape: str, fmt: str) -> str:
    return f"{NAMES[shape]}, {fmt.upper()}"


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 10 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"
