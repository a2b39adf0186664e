"""The trace: counters, summary, and a file that a trace viewer opens."""

import json
import time
from pathlib import Path

import pytest

from megaslide.tracing import Span, Trace, TraceSummary, summarize


def test_summary_counts_between_two_snapshots() -> None:
    trace = Trace()
    with trace.span("h2d", "before", 5):
        pass
    before = trace.snapshot()
    with trace.span("h2d", "load", 1000):
        time.sleep(0.02)
    with trace.span("compute", "forward"):
        time.sleep(0.04)
    with trace.span("wait", "slot loaded"):
        time.sleep(0.01)
    summary = summarize(before, trace.snapshot())
    assert summary.nbytes["h2d"] == 1000
    assert summary.busy_s["h2d"] == pytest.approx(0.02, rel=0.5)
    assert summary.wait_s == pytest.approx(0.01, rel=0.9)
    assert set(summary.busy_s) == {"h2d", "compute"}
    assert summary.overlap == pytest.approx(summary.busy_s["compute"] / summary.seconds)
    assert summary.seconds >= 0.07


def test_summary_in_words() -> None:
    summary = TraceSummary(
        seconds=2.0, busy_s={"h2d": 0.5, "compute": 1.8}, nbytes={"h2d": 3_000_000_000}, wait_s=0.1
    )
    assert summary.overlap == 0.9
    lines = str(summary).splitlines()
    assert lines[0] == "2.000 s, overlap efficiency 0.900"
    assert lines[1].split() == ["compute", "busy", "1.800", "s", "90.0", "%"]
    assert lines[2].split() == ["h2d", "busy", "0.500", "s", "25.0", "%", "3.000", "GB"]
    assert lines[3].split() == ["wait", "0.100", "s"]
    assert TraceSummary(seconds=0.0, busy_s={}, nbytes={}, wait_s=0.0).overlap == 0


def test_chrome_trace_has_one_named_row_per_lane(tmp_path: Path) -> None:
    trace = Trace()
    trace.spans.extend([Span("h2d", "blocks.0", 10.0, 10.5, 64), Span("compute", "x", 10.5, 11.0)])
    trace.save_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("h2d", "blocks.0", 0.0, 500_000.0),
        ("compute", "x", 500_000.0, 500_000.0),
    ]
    assert spans[0]["args"] == {"bytes": 64}
