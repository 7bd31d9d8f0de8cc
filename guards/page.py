"""The report as one self-contained HTML page: totals, a timeline of compiles over steps, causes with their remedies."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ort_backend.guards.diagnosis import Cause, Diagnosis, counted
from ort_backend.guards.events import CompileRecord
from ort_backend.guards.remedies import Remedy, limit_remedy

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5f6b76; --line: #d9dfe5;
  --paper: #fff; --loss: #c2410c; --first: #2563eb; --code: #f3f5f7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa5b1; --line: #343c44; --paper: #15181b; --loss: #fb923c; --first: #60a5fa;
  --code: #1f2429 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 68rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2.2rem } .soft { color: var(--soft) }
table { border-collapse: collapse; width: 100% }
td, th { border-top: 1px solid var(--line); padding: .5rem .6rem; vertical-align: top; text-align: left }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: var(--code); border-radius: 4px; overflow-wrap: anywhere }
code { padding: .05rem .3rem } pre { padding: .5rem .7rem; white-space: pre-wrap; margin: .4rem 0 0 }
.alarm { border: 2px solid var(--loss); border-radius: 6px; padding: .6rem 1rem; margin: 1rem 0 }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: var(--soft) } .axis { stroke: var(--line) }
.first { fill: var(--first) } .again { fill: var(--loss) } .lost { fill: none; stroke: var(--loss); stroke-width: 1.5 }
"""


def page(diagnosis: Diagnosis, title: str = "Compiles and recompiles") -> str:
    """The whole page as text; it loads nothing from elsewhere."""
    compiles, recompiles = counted(len(diagnosis.records), "compile"), counted(sum(record.recompile for record in diagnosis.records), "recompile")
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{compiles} took {diagnosis.seconds:.1f} s; {recompiles} lost {diagnosis.lost:.1f} s of them.</p>",
        *_limits(diagnosis),
        "<h2>Timeline</h2>",
        timeline(diagnosis.records),
        "<h2>Causes</h2>",
        _causes(diagnosis.causes),
        *_breaks(diagnosis),
        "<h2>Compiles</h2>",
        _compiles(diagnosis.records),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def timeline(records: Sequence[CompileRecord], width: int = 1000, height: int = 240) -> str:
    """An SVG: each compile a bar as high as its seconds, at its step (at its second, where the steps are not known), and the sum lost so far."""
    if not records:
        return '<p class="soft">No compile has been recorded.</p>'
    steps = [record.step for record in records]
    by_step = None not in steps
    start = min(record.time for record in records)
    places = [float(step or 0) for step in steps] if by_step else [record.time - start for record in records]
    low, high = min(places), max(places)
    left, right, top, bottom = 46, width - 50, 14, height - 34
    most = max(record.total_seconds for record in records) or 1.0
    lost = sum(record.total_seconds for record in records if record.recompile) or 1.0

    def across(place: float) -> float:
        return left + 6 + (place - low) / ((high - low) or 1.0) * (right - left - 12)

    bars, points, sum_lost = [], [f"{left},{bottom}"], 0.0
    beside: dict[float, int] = {}  # compiles of one step stand side by side
    for record, place in sorted(zip(records, places, strict=True), key=lambda pair: pair[1]):
        beside[place] = beside.get(place, -1) + 1
        x, tall = min(across(place) + 5 * beside[place], right), record.total_seconds / most * (bottom - top)
        if record.recompile:
            points.append(f"{x:.1f},{bottom - sum_lost / lost * (bottom - top):.1f}")
            sum_lost += record.total_seconds
            points.append(f"{x:.1f},{bottom - sum_lost / lost * (bottom - top):.1f}")
        bars.append(
            f'<rect class="{"again" if record.recompile else "first"}" x="{x - 2:.1f}" y="{bottom - tall:.1f}" width="4" height="{max(tall, 1):.1f}">'
            f"<title>{html.escape(str(record))}</title></rect>"
        )
    points.append(f"{right},{bottom - sum_lost / lost * (bottom - top):.1f}")
    unit = "training step" if by_step else "seconds since the first compile"
    ends = (f"{low:.0f}", f"{high:.0f}") if by_step else (f"{low:.1f}", f"{high:.1f}")
    lost_label = f'<text x="{right + 4}" y="{top + 4}">{lost:.1f} s</text>' if sum_lost else ""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Compiles by {unit}">'
        f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
        f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{bottom}"/>'
        f'<text x="{left - 4}" y="{top + 4}" text-anchor="end">{most:.1f} s</text>{lost_label}'
        f'<text x="{left + 6}" y="{bottom + 15}">{ends[0]}</text><text x="{right - 6}" y="{bottom + 15}" text-anchor="end">{ends[1]}</text>'
        f'<text x="{(left + right) / 2}" y="{bottom + 29}" text-anchor="middle">{unit}</text>'
        f'{"".join(bars)}<polyline class="lost" points="{" ".join(points) if sum_lost else ""}"/></svg>'
        '<p class="soft">Blue: first compile of a function. Orange: recompile; the line is the time lost to recompiles so far (scale on the '
        "right).</p>"
    )


def _limits(diagnosis: Diagnosis) -> list[str]:
    return [
        f'<div class="alarm"><strong>{html.escape(hit.function)} runs in eager PyTorch:</strong> <code>torch._dynamo.config.{html.escape(hit.limit)}'
        f"</code> ({hit.value}) was reached. Called from <code>{html.escape(hit.called_from)}</code>."
        f"{_remedy(limit_remedy(hit.limit, hit.value, str(hit.cause)))}</div>"
        for hit in diagnosis.limits
    ]


def _causes(causes: Sequence[Cause]) -> str:
    if not causes:
        return '<p class="soft">Nothing was recompiled.</p>'
    rows = []
    for cause in causes:
        details = [f"Values: {html.escape(cause.shown_values)}" if cause.values else ""]
        details.append(f"Called from <code>{html.escape(cause.called_from)}</code>")
        details.append(f"Guarded for <code>{html.escape(cause.line)}</code>" if cause.line else "")
        rows.append(
            f'<tr><td class="number">{cause.seconds:.1f}</td><td class="number">{cause.count}</td><td><strong>{html.escape(cause.kind)}</strong> of '
            f"<code>{html.escape(cause.passed_as or cause.source)}</code> in {html.escape(cause.function)}"
            f'<div class="soft">{"<br>".join(detail for detail in details if detail)}</div>{_remedy(cause.remedy)}</td></tr>'
        )
    return f'<table><tr><th class="number">Seconds</th><th class="number">Count</th><th>Cause and remedy</th></tr>{"".join(rows)}</table>'


def _breaks(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.breaks:
        return []
    rows = [
        f"<tr><td><code>{html.escape(cut.where or cut.function)}</code><div>{html.escape(cut.reason)}</div>{_remedy(cut.remedy)}</td></tr>"
        for cut in diagnosis.breaks
    ]
    return ["<h2>Graph breaks</h2>", f"<table>{''.join(rows)}</table>"]


def _compiles(records: Sequence[CompileRecord]) -> str:
    rows = [
        f'<tr><td class="number">{record.index}</td><td class="number">{record.step if record.step is not None else ""}</td>'
        f"<td>{html.escape(record.compile_id or '')}</td><td>{html.escape(record.function)}</td>"
        f"<td>{html.escape(str(record.cause or 'cause unknown')) if record.recompile else 'first compile'}</td>"
        f'<td class="number" title="{html.escape(", ".join(f"{name} {spent:.2f}" for name, spent in record.seconds.items()))}">'
        f"{record.total_seconds:.2f}</td></tr>"
        for record in records
    ]
    head = '<tr><th class="number">#</th><th class="number">Step</th><th>Id</th><th>Function</th><th>Why</th><th class="number">Seconds</th></tr>'
    return f"<details><summary>All {len(records)}</summary><table>{head}{''.join(rows)}</table></details>"


def _remedy(advice: Remedy) -> str:
    code = f"<pre>{html.escape(advice.code)}</pre>" if advice.code else ""
    return f"<div>{html.escape(advice.text)}</div>{code}"
