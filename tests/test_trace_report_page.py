"""The HTML page: it needs nothing but itself, and a browser shows what the result says."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from trace_fakes import long_result, lower_result, small_report

from oomguard.report.trace_html import THE_REST, page_data, trace_html
from oomguard.report.trace_report import LabelledTrace, TraceReport
from oomguard.units import MIB

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for found in map(shutil.which, BROWSERS) if found), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--hide-scrollbars",
]
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser to open the page with ({', '.join(BROWSERS)})"
)


@pytest.fixture
def report() -> TraceReport:
    compared = LabelledTrace("every", "every block recomputed", lower_result())
    return small_report(compared=compared, budget_bytes=40 * MIB)


def data_of(page: str) -> dict[str, Any]:
    """The numbers in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


class References(HTMLParser):
    """Collects every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        loading = ("src", "href", "srcset", "data", "action", "poster", "background")
        self.found += [f"<{tag} {name}={value}>" for name, value in attributes if name in loading]


def test_page_refers_to_nothing_outside(report: TraceReport) -> None:
    page = trace_html(report)
    references = References()
    references.feed(page)
    assert references.found == []
    assert not re.search(r"https?://|url\(|@import|\bimport\(|\bfetch\(|XMLHttpRequest|WebSocket", page)
    assert "default-src 'none'" in page


def test_page_data_unfolds_to_the_timeline(report: TraceReport) -> None:
    data = data_of(trace_html(report))
    assert data["budget"] == report.budget_bytes
    for run, labelled in zip(data["runs"], report.runs, strict=True):
        timeline = labelled.result.timeline
        sums = [0] * len(timeline.active)
        for changes in run["series"]:
            starts, sizes = changes[0::2], changes[1::2]
            for start, end, size in zip(starts, [*starts[1:], len(sums)], sizes, strict=True):
                for index in range(start, end):
                    sums[index] += size
        assert sums == timeline.active
        assert (run["peak"], run["at"]) == (labelled.result.peak_bytes, labelled.result.moment.index)
        spans = list(zip(*(run["spans"][k::4] for k in range(4)), strict=True))
        at = run["at"]
        assert sum(size for _, size, start, end in spans if start <= at < end) == run["peak"]


def test_slivers_are_one_series(report: TraceReport) -> None:
    names = page_data(report)["series"]
    assert names[0] == THE_REST
    assert "batch" not in names  # 1 KiB of 46 MiB
    assert {"parameters", "saved tensors", "in-flight window"} <= set(names)


def test_text_cannot_break_out_of_the_page() -> None:
    hostile = "</script><script>alert(1)</script><!--data-->&"
    page = trace_html(small_report(title=hostile, settings=hostile))
    assert page.count("</script>") == 2
    assert "<script>alert" not in page
    assert data_of(page)["title"] == hostile
    assert html.escape(hostile) in page


@dataclass(frozen=True)
class Shown:
    """What a browser made of a page."""

    dom: str
    console: list[str]

    def texts(self, kind: str) -> list[str]:
        """The texts of elements of a class."""
        found = re.findall(rf'<\w+ class="{kind}"[^>]*>([^<]*)<', self.dom)
        return [html.unescape(text) for text in found]

    def attribute(self, name: str) -> list[str]:
        return [html.unescape(value) for value in re.findall(rf'{name}="([^"]*)"', self.dom)]


def browse(folder: Path, page: str, flags: Sequence[str] = ("--dump-dom",)) -> Shown:
    """Opens a page in a browser of its own and reads it once its scripts have run."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    profile = folder / "profile"
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, path.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return Shown(ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line])


def driven(page: str, script: str) -> str:
    """The page with a user in it: ``press(key)``, ``point(x)``; ``plots``; ``tell(name, value)`` into the DOM."""
    user = """
      const plots = [...document.querySelectorAll(".plot")];
      const press = (key, plot = plots[0], more = {}) =>
        plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, ...more }));
      const point = (x, plot = plots[0]) => plot.dispatchEvent(new PointerEvent("pointermove", {
        clientX: plot.getBoundingClientRect().left + x, clientY: 0, bubbles: true }));
      const tell = (name, value) => document.documentElement.setAttribute(`data-${name}`, value);
    """
    return page.replace("</body>", f"<script>{{{user}{script}}}</script></body>")


@needs_browser
@pytest.mark.slow
def test_browser_shows_peak_budget_and_both_policies(report: TraceReport, tmp_path: Path) -> None:
    shown = browse(tmp_path, trace_html(report))
    assert shown.console == []
    assert 'data-drawn="yes"' in shown.dom
    assert shown.texts("tag peak") == ["peak 46.0 MiB", "peak 30.0 MiB"]
    assert shown.texts("tag budget") == ["budget 40.0 MiB", "budget 40.0 MiB"]
    assert shown.attribute("aria-label")[1:] != []
    assert shown.attribute("aria-valuetext") == [
        "primitive 4 of 6: Matmul, backward of block 1 in blocks.1.mlp.up, 46.0 MiB",
        "primitive 4 of 6: Matmul, backward of block 1 in blocks.1.mlp.up, 30.0 MiB",
    ]
    assert re.search(r"2 × 8\.0 MiB</td><td>.*?blocks\.\*\.mlp\.up saved AddMM output", shown.dom)


@needs_browser
@pytest.mark.slow
def test_browser_follows_keys_and_pointer(report: TraceReport, tmp_path: Path) -> None:
    script = """
      const now = (plot) => plot.getAttribute("aria-valuenow");
      press("Home"); tell("home", now(plots[0])); press("ArrowRight"); tell("right", now(plots[0]));
      press("PageUp"); tell("block", now(plots[0])); press("End"); tell("end", now(plots[0]));
      press("p"); tell("peak", now(plots[0]));
      point(70, plots[1]); tell("pointed", now(plots[1]));
      tell("tip", plots[1].querySelector(".tip").textContent);
      document.querySelector("#legend button").click();
      tell("lit", document.querySelectorAll('#legend [aria-pressed="true"]').length);
      press("+"); press("Escape");
    """
    shown = browse(tmp_path, driven(trace_html(report), script))
    assert shown.console == []
    told = {name: shown.attribute(f"data-{name}")[0] for name in ("home", "right", "block", "end", "peak")}
    assert told == {"home": "1", "right": "2", "block": "5", "end": "6", "peak": "4"}
    assert shown.attribute("data-pointed") == ["1"]
    (tip,) = shown.attribute("data-tip")
    assert "AddMM, 1 of 6" in tip
    assert "forward · block 0 · blocks.0.mlp.up" in tip
    assert "2 × blocks.*.mlp.up.weight parameter" in tip
    assert shown.attribute("data-lit") == ["1"]


@needs_browser
@pytest.mark.slow
def test_no_spike_is_lost_among_thirty_thousand_primitives(tmp_path: Path) -> None:
    primitives, spike_at = 30_000, 12_345
    asked = LabelledTrace("none", "no recompute", long_result(primitives, spike_at))
    script = f"""
      const plot = plots[0];
      const x = 64 + ({spike_at} + 0.5) / {primitives} * (plot.clientWidth - 76);
      press("Escape");  // all of the step, drawn now: the page itself draws when the browser next does
      press("Home");
      point(x);
      tell("pointed", plot.getAttribute("aria-valuenow"));
      const canvas = plot.querySelector("canvas");
      const scale = canvas.width / plot.clientWidth;
      const opaque = canvas.getContext("2d").getImageData(0, 60 * scale, canvas.width, 1).data;
      tell("spike", opaque[4 * Math.floor(x * scale) + 3]);
      tell("beside", opaque[4 * Math.floor((x + 30) * scale) + 3]);
      const start = performance.now();
      for (let k = 0; k < 20; k++) press("ArrowRight");
      tell("ms", Math.ceil((performance.now() - start) / 20));
    """
    page = trace_html(small_report(asked=asked))
    assert len(page) < 4_000_000
    shown = browse(tmp_path, driven(page, script))
    assert shown.console == []
    assert shown.texts("tag peak") == ["peak 512.0 MiB"]
    assert shown.attribute("data-pointed") == [str(spike_at + 1)]
    assert shown.attribute("data-spike") == ["255"]
    assert shown.attribute("data-beside") == ["0"]
    assert int(shown.attribute("data-ms")[0]) < 250  # a step of the cursor, on a busy machine


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "scheme"), [("1280,800", "dark"), ("800,600", "light"), ("380,700", "dark")]
)
def test_page_is_no_wider_than_the_window(
    size: str, scheme: str, report: TraceReport, tmp_path: Path
) -> None:
    script = """
      tell("wide", document.documentElement.scrollWidth - window.innerWidth);
      tell("page", getComputedStyle(document.body).backgroundColor);
      tell("sideways", plots[0].getBoundingClientRect().top === plots[1].getBoundingClientRect().top);
    """
    scheme_flag = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    flags = ["--dump-dom", f"--window-size={size}", scheme_flag]
    shown = browse(tmp_path, driven(trace_html(report), script), flags)
    assert shown.console == []
    assert int(shown.attribute("data-wide")[0]) <= 0
    red = int(re.findall(r"\d+", shown.attribute("data-page")[0])[0])
    assert (red < 64) is (scheme == "dark")
    assert shown.attribute("data-sideways") == [str(not size.startswith("380")).lower()]


def header_texts(shown: Shown, name: str) -> str:
    found = re.search(rf'<\w+ id="{name}"[^>]*>(.*?)</(?:p|ul)>', shown.dom, re.DOTALL)
    assert found is not None
    return html.unescape(re.sub(r"<[^>]+>", " ", found[1]))


@needs_browser
@pytest.mark.slow
def test_page_names_the_machine_the_verdict_and_what_would_fit(report: TraceReport, tmp_path: Path) -> None:
    bound = "recommended working set"
    machine = "Apple M5 Pro, 48 GiB"
    shown = browse(tmp_path, trace_html(replace(report, machine=machine, bound_by=bound)))
    assert "simulated on Apple M5 Pro, 48 GiB (" in header_texts(shown, "settings")
    verdict = header_texts(shown, "verdict")
    assert (
        verdict == f"Does not fit: 46.0 MiB at most, 6.0 MiB over the budget of 40.0 MiB (bound by: {bound})"
    )
    assert 'id="verdict" class="over"' in shown.dom
    assert "Fits with every block recomputed: 10.0 MiB below the budget of 40.0 MiB." in header_texts(
        shown, "advice"
    )


@needs_browser
@pytest.mark.slow
def test_page_without_a_budget_says_so_and_labels_its_strips(tmp_path: Path) -> None:
    script = """
      const written = [];
      const fill = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        written.push(text);
        fill.call(this, text, ...at);
      };
      press("Escape");
      tell("written", written.join("|"));
    """
    shown = browse(tmp_path, driven(trace_html(small_report(budget_bytes=None)), script))
    assert shown.console == []
    assert header_texts(shown, "verdict").startswith("Held against no budget: ")
    assert 'id="verdict" class=""' in shown.dom
    key = " ".join(header_texts(shown, "key").split())
    assert key.startswith("Under a chart, phase: forward backward")
    assert "block: the layer a primitive belongs to" in key
    (written,) = shown.attribute("data-written")
    assert {"active", "phase", "block", "primitive", "1", "6"} <= set(written.split("|"))


def test_page_that_fits_gives_no_way_out() -> None:
    data = page_data(small_report(budget_bytes=64 * MIB))
    assert data["fits"] is True
    assert data["verdict"] == "Fits: 46.0 MiB at most, 18.0 MiB below the budget of 64.0 MiB"
    assert data["advice"] == []
