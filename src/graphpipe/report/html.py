"""The whole report as one page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphpipe.estimate import Estimate, format_bytes
from graphpipe.report.facts import measured_pass_s, stage_facts, summary
from graphpipe.report.memory import memory_svg
from graphpipe.report.notes import note_lines
from graphpipe.report.palette import DARK, LIGHT, Scheme
from graphpipe.report.stage_graph import stage_graph_svg
from graphpipe.report.svg import element, text_of
from graphpipe.report.timeline import timeline_svg
from graphpipe.report.units import format_seconds
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy
from graphpipe.trace import SpanKind, Trace

# Pointing at a stage in one picture dims the others in all of them. Without a script the page lacks only that.
_SCRIPT = """
const stages=[...document.querySelectorAll('[data-stage]')];
function show(stage){for(const e of stages)e.classList.toggle('dim',stage!==null&&e.dataset.stage!==stage)}
for(const e of stages){e.addEventListener('mouseenter',()=>show(e.dataset.stage));
e.addEventListener('mouseleave',()=>show(null))}
"""


def html_report(
    strategy: Strategy,
    estimate: Estimate,
    measured: Trace | None = None,
    *,
    title: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return a page about a strategy: figures, stage graph, timelines, memory, stages, notes.

    Args:
        strategy: What was planned.
        estimate: What it is predicted to cost.
        measured: What happened in a run. Its timeline is drawn on the scale of the predicted one.
        title: The heading; by default the model's name.
        facts: Further lines for the summary, such as the host or the version, by name.
    """
    heading = title if title is not None else strategy.graph.name
    has_measured = measured is not None and measured.makespan_s > 0
    end_s = max(estimate.iteration_s, measured.makespan_s if measured is not None else 0.0) or None
    sections = [
        _section("Stage graph", _picture(stage_graph_svg(strategy, estimate)), _graph_words(strategy)),
        _section(
            "Predicted timeline",
            _picture(timeline_svg(estimate.trace, strategy, end_s=end_s, prefix="gp-predicted-")),
            f"One mini-batch of {strategy.mini_batch_size} samples in {format_seconds(estimate.iteration_s)}.",
        ),
    ]
    if measured is not None and has_measured:
        sections.append(
            _section(
                "Measured timeline",
                _picture(timeline_svg(measured, strategy, end_s=end_s, prefix="gp-measured-")),
                _measured_words(estimate, measured),
            )
        )
    sections += [
        _section("Memory by device", _picture(memory_svg(strategy, estimate, measured))),
        _section("Stages", _stage_table(strategy, measured if has_measured else None)),
    ]
    notes = note_lines(strategy.notes)
    if notes:
        sections.append(_section("Notes of the planner", _pairs(notes)))
    subtitle = f"A strategy by {strategy.planner} for {len(strategy.cluster)} devices"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{text_of(heading)} · GraphPipe</title><style>{_css()}</style></head>\n<body><header>"
        f"<h1>{text_of(heading)}</h1><p>{text_of(subtitle)}</p></header><main>\n"
        f"{_section('Summary', _figures(summary(strategy, estimate, measured)) + _facts(facts))}\n"
        + "\n".join(sections)
        + f"\n</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _section(name: str, content: str, words: str = "") -> str:
    lead = element("p", text_of(words)) if words else ""
    identifier = name.lower().replace(" ", "-")
    return (
        f'<section aria-labelledby="{identifier}"><h2 id="{identifier}">{text_of(name)}</h2>{lead}{content}</section>'
    )


def _picture(markup: str) -> str:
    return f'<div class="picture" tabindex="0">{markup}</div>'


def _graph_words(strategy: Strategy) -> str:
    stages = strategy.stages
    count = len(stages.stages)
    if count == 1:
        return "One stage holds the whole model."
    if stages.depth == count:
        return f"{count} stages in sequence."
    return f"{count} stages, of which at most {stages.depth} follow each other; the others run beside them."


def _measured_words(estimate: Estimate, measured: Trace) -> str:
    text = f"One mini-batch in {format_seconds(measured.makespan_s)}"
    if not estimate.iteration_s:
        return f"{text}."
    return f"{text}, {measured.makespan_s / estimate.iteration_s:.2f} × the prediction; the scale is the same."


def _figures(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the headline figures: the durations and the throughput large, the others below."""
    tiles = "".join(f"<div><dt>{text_of(name.capitalize())}</dt><dd>{text_of(text)}</dd></div>" for name, text in pairs)
    return f'<dl class="figures">{tiles}</dl>'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{text_of(name)}</dt><dd>{text_of(text)}</dd>" for name, text in pairs)
    return f'<dl class="pairs">{rows}</dl>'


def _facts(facts: Mapping[str, str] | None) -> str:
    return _pairs(facts.items()) if facts else ""


def _stage_table(strategy: Strategy, measured: Trace | None) -> str:
    facts = stage_facts(strategy)
    has_recompute = any(stage.recompute is not Recompute.NONE for stage in facts)
    header = ["Stage", "Holds", "Operators", "Devices", "Replicas", "Micro-batch", "Parameters", "In flight"]
    header += ["Forward", "Backward"]
    if measured is not None:
        header += ["Measured forward", "Measured backward"]
    if has_recompute:
        header.append("Recompute")
    text_columns = {"Holds", "Devices", "Recompute"}
    rows = []
    for stage in facts:
        backward = format_seconds(stage.backward_s) if strategy.stages.has_backward[stage.stage] else "–"
        cells = [
            str(stage.stage),
            stage.label,
            str(stage.num_operators),
            stage.devices,
            str(stage.num_replicas),
            f"{stage.micro_batch_size} × {stage.num_micro_batches}",
            format_bytes(stage.parameter_bytes),
            str(stage.num_in_flight),
            format_seconds(stage.forward_s),
            backward,
        ]
        if measured is not None:
            for kind, predicted_s in ((SpanKind.FORWARD, stage.forward_s), (SpanKind.BACKWARD, stage.backward_s)):
                cells.append(_measured_cell(measured_pass_s(measured, stage.stage, kind), predicted_s))
        if has_recompute:
            cells.append(stage.recompute.value)
        rows.append(_row(cells, header, text_columns))
    head = "".join(f'<th scope="col"{_text_class(name, text_columns)}>{text_of(name)}</th>' for name in header)
    return (
        f'<div class="picture" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        "<p>Micro-batch: samples × how many. In flight: the most samples between their forward and backward passes. "
        "Times are those of one replica for its part of a micro-batch.</p>"
    )


def _measured_cell(found_s: float | None, predicted_s: float) -> str:
    if found_s is None:
        return "–"
    ratio = f" ({found_s / predicted_s:.2f} ×)" if predicted_s else ""
    return f"{format_seconds(found_s)}{ratio}"


def _row(cells: Sequence[str], header: Sequence[str], text_columns: set[str]) -> str:
    found = [f'<th scope="row">{text_of(cells[0])}</th>']
    for name, cell in zip(header[1:], cells[1:], strict=True):
        content = f"<code>{text_of(cell)}</code>" if name == "Holds" else text_of(cell)
        found.append(f"<td{_text_class(name, text_columns)}>{content}</td>")
    return f'<tr data-stage="{text_of(cells[0])}">{"".join(found)}</tr>'


def _text_class(name: str, text_columns: set[str]) -> str:
    return ' class="text"' if name in text_columns else ""


def _css() -> str:
    return (
        f":root{{{_variables(LIGHT)}--page:#f5f6f8}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}--page:#0d1014}}}}"
        "*{box-sizing:border-box}"
        "body{margin:0;background:var(--page);color:var(--ink);"
        "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
        "header,main{max-width:1280px;margin:0 auto;padding:0 24px}header{padding-top:28px}"
        "h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:0 0 8px}"
        "header p{margin:2px 0 18px}p,header p,dt{color:var(--muted)}p{margin:0 0 10px;font-size:14px}"
        "section{background:var(--canvas);border:1px solid var(--line);border-radius:8px;padding:16px 18px;"
        "margin:0 0 16px}"
        ".picture{overflow-x:auto}.picture:focus-visible{outline:2px solid var(--muted)}"
        # On a narrow screen a picture keeps its size and scrolls: text stays readable.
        ".picture svg{display:block;max-width:100%;height:auto}"
        "@media(max-width:820px){.picture svg{max-width:none}}"
        ".figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:14px 22px;margin:0}"
        ".figures dt{font-size:13px}.figures dd{margin:0;font-size:16.5px;font-weight:600;line-height:1.3;"
        "overflow-wrap:anywhere}"
        ".pairs{display:grid;grid-template-columns:max-content 1fr;gap:3px 22px;margin:0;font-size:14px}"
        ".figures+.pairs{border-top:1px solid var(--line);margin-top:14px;padding-top:12px}"
        ".pairs dd{margin:0;overflow-wrap:anywhere}"
        "table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}"
        "th,td{padding:5px 7px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}"
        "thead th{color:var(--muted);font-weight:600;vertical-align:bottom;white-space:normal}"
        ".text{text-align:left}td.text{white-space:normal;overflow-wrap:anywhere;min-width:90px}td.text:has(code){min-width:190px}"
        "code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        "table+p,.picture+p{margin:10px 0 0}"
        ".dim{opacity:.28}svg .dim,tr.dim{transition:opacity .12s}"
        "@media print{section{break-inside:avoid}body{background:none}}"
    )


def _variables(scheme: Scheme) -> str:
    return f"--canvas:{scheme.canvas};--ink:{scheme.ink};--muted:{scheme.muted};--line:{scheme.line};"
