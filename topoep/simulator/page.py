# SPDX-License-Identifier: Apache-2.0
"""One self-contained page: no script, nothing from the network, readable on a phone."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topoep._version import __version__
from topoep.simulator.plots import draw_speedups, draw_timeline
from topoep.simulator.simulate import Result
from topoep.simulator.sweep import Point
from topoep.simulator.table import COLUMNS, cells, heading, notes

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a202c; background: #fff;
       max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #e2e8f0;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.best td { background: #f0fff4; font-weight: 600; }
svg { width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { font-weight: 600; } dd { margin: 0; }
.note { background: #fffaf0; border-left: 4px solid #ed8936; padding: .5rem .8rem; }
.note p { margin: .2rem 0; }
@media (max-width: 40rem) {
  body { padding: .6rem; }
  table.cards, .cards tbody, .cards tr, .cards td { display: block; }
  .cards thead { display: none; }
  .cards tr { border: 1px solid #cbd5e0; border-radius: .4rem; margin: .6rem 0; padding: .3rem; }
  .cards td, .cards td:first-child { text-align: right; border: 0; padding: .15rem .4rem;
                                     white-space: normal; }
  .cards td::before { content: attr(data-name); float: left; color: #4a5568; }
  .cards td:first-child { text-align: left; font-weight: 600; }
  .cards td:first-child::before { content: ""; }
}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(result: Result, points: Sequence[Point], path: Path) -> None:
    """Writes the page of a simulation.

    Args:
        result: of all planners.
        points: of the picture of speed-ups; the picture is left out if there are none.
        path: an .html file.
    """
    path.write_text(page(result, points), encoding="utf-8")


def page(result: Result, points: Sequence[Point]) -> str:
    """The page as text; everything that comes from a trace or a file is escaped."""
    request = result.request
    best = max(result.planners, key=lambda planner: planner.speedup).name
    rows = "".join(_row(cells(p), p.name == best) for p in result.planners)
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name, _ in COLUMNS)
    meanings = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(meaning)}</dd>" for name, meaning in COLUMNS if meaning
    )
    pictures = _figure(lambda axes: draw_timeline(axes, result), "One layer with and without")
    if points:
        pictures = _figure(lambda axes: draw_speedups(axes, points), "Speed-up") + pictures
    assumptions = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>"
        for values in (vars(request.setting), vars(request.cluster.hardware), vars(request.model))
        for name, value in values.items()
    )
    origin = ", ".join(f"{name}: {value}" for name, value in request.trace.meta.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_text(heading(result))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(heading(result))}</h1>
<div class="note">{"".join(f"<p>{_text(line)}</p>" for line in notes(result))}</div>
<h2>Planners</h2>
<div class="wide"><table class="cards">
<thead><tr>{head}</tr></thead>
<tbody>{rows}</tbody>
</table></div>
<dl>{meanings}</dl>
<h2>Pictures</h2>
{pictures}
<h2>Layers</h2>
{_layers(result, best)}
<h2>Assumptions</h2>
<dl>{assumptions}</dl>
<h2>Trace</h2>
<p>{request.trace.num_steps} steps, {request.trace.num_layers} layers, {request.trace.num_ranks}
ranks, {request.trace.num_experts} experts, top-{request.trace.top_k}. {_text(origin)}</p>
<p>topoep {_text(__version__)}</p>
</body>
</html>
"""


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _row(values: Sequence[str], best: bool) -> str:
    columns = "".join(
        f'<td data-name="{_text(name)}">{_text(value)}</td>'
        for (name, _), value in zip(COLUMNS, values, strict=True)
    )
    return f'<tr class="best">{columns}</tr>' if best else f"<tr>{columns}</tr>"


def _layers(result: Result, best: str) -> str:
    """Where it pays: imbalance and speed-up of every layer of the trace."""
    planner = result[best if best != "none" else result.planners[-1].name]
    rows = "".join(
        f"<tr><td>layer {layer}</td><td>{imbalance:.3f}</td>"
        f"<td>{100 * (speedup - 1):+.1f} %</td></tr>"
        for layer, (imbalance, speedup) in enumerate(
            zip(planner.layer_imbalances, planner.layer_speedups, strict=True)
        )
    )
    return (
        '<div class="wide"><table><thead><tr><th scope="col">layer</th><th scope="col">imbalance'
        f'</th><th scope="col">layer speed-up, {_text(planner.label)}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _figure(draw: Callable[[Axes], None], title: str) -> str:
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    draw(figure.subplots())
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    picture = target.getvalue()
    picture = picture[picture.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{_text(title)}"', 1
    )
    return f"<figure style='margin:0'>{picture}</figure>"
