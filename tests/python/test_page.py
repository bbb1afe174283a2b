"""`tessera page`, seen in a browser."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Net, batch, config, engines, make

import tessera
from tessera import cli

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def trained(folder: Path, name: str, steps: int, rate: float) -> None:
    """A run of two ranks, in lines of JSON and in CSV files, with a step that is skipped and a warning."""
    section = {"enabled": True, "output_path": str(folder / "csv"), "job_name": name}
    cfg = config(
        2,
        fp16={"enabled": True, "initial_scale_power": 4},
        optimizer={"type": "AdamW", "params": {"lr": rate}},
        comms_logger={"enabled": True},
        csv_monitor=section,
        tessera={"json_lines": str(folder / f"{name}.jsonl"), "min_unit_elements": 1},
        data_parallel_size=4,
    )

    def body(engine: tessera.Engine, rank: int) -> None:
        engine.expect(steps, tokens_per_sample=5)
        engine.count_flops(1e6, peak=1e12)
        for step in range(steps):
            x, y = batch(10 * rank + step)
            engine.backward(engine(x * (float("inf") if step == 3 else 1), y))
            engine.step()
        engine.monitor.write_events([("Validation/loss </script>", 0.5, engine.global_samples)])
        engine.monitor.warn("one of the program's own, <b>with marks</b>", engine.global_samples)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engines(make(Net), 2, cfg, body)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    trained(folder, "first", 12, 0.01)
    trained(folder, "a second one, whose name is rather long for a narrow screen", 20, 0.03)
    return folder


def page(folder: Path, *given: Path) -> Path:
    out = folder / "page.html"
    assert cli.main(["page", *map(str, given), "--out", str(out)]) == 0
    return out


def data_of(file: Path) -> Any:
    found = re.search(r"^const DATA = (.*);$", file.read_text(), re.MULTILINE)
    assert found is not None
    return json.loads(found.group(1))


def test_a_page_has_what_writers_wrote(runs: Path, tmp_path: Path) -> None:
    lines = data_of(page(tmp_path, runs / "first.jsonl"))
    (run,) = lines["runs"]
    assert lines["x"] == "step" and run["name"] == "first" and run["samples"] == 12 * 8
    series = {name.removeprefix("Train/Samples/"): points for name, points in run["series"].items()}
    assert [x for x, _ in series["train_loss"]] == list(range(1, 13))
    assert series["train_loss"][3][1] is None and len(series["grad_norm"]) == 11
    wanted = {"lr", "loss_scale", "samples_per_second", "tokens_per_second", "tflops", "mfu", "memory_bytes_states"}
    wanted |= {"memory_formula_states", "phase_ms_forward", "phase_ms_gather", "phase_ms_other"}
    wanted |= {"comm_bytes_reduce_scatter", "comm_ms_reduce_scatter"}
    assert wanted <= series.keys()
    said = [(x, text.split(" ")[0]) for x, text in run["warnings"]]
    assert (0, "data_parallel_size:") in said and (4, "the") in said and (12, "one") in said
    (of_csv,) = data_of(page(tmp_path, runs / "csv" / "first"))["runs"]
    own = ("Validation/loss </script>", "Validation_loss_<_script>")
    for name, points in run["series"].items():
        assert of_csv["series"][own[1] if name == own[0] else name] == points
    assert of_csv["warnings"] == run["warnings"]


def test_a_folder_is_all_its_runs_and_nothing_is_fetched(runs: Path, tmp_path: Path) -> None:
    out = page(tmp_path, runs, runs / "first.jsonl")
    names = [run["name"] for run in data_of(out)["runs"]]
    assert len(names) == 3 and names.count(str(runs / "first.jsonl")) == 2
    text = out.read_text()
    assert not re.search(r"(src|href)=|@import|url\(|fetch\(|import\(", text)
    assert text.count("</script>") == 1 and "default-src 'none'" in text


class Browser:
    """Chromium without a window, by its protocol over two pipes."""

    def __init__(self, profile: Path) -> None:
        (self._theirs, to), (self._from, ours) = os.pipe(), os.pipe()
        self._to = to
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]

        def places() -> None:  # the protocol's descriptors are 3 and 4
            os.dup2(self._theirs, 200)
            os.dup2(ours, 201)
            os.dup2(200, 3)
            os.dup2(201, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=places, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(self._theirs)
        os.close(ours)
        self._reader = os.fdopen(self._from, "rb")
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._reader.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, file: Path, width: int, scheme: str) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.close()
        os.close(self._to)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


# What lies beyond the right edge of the page or of its own card, and texts that lie on each other in a chart.
CUT = """[...document.querySelectorAll("main *")].filter((each) => {
  const box = each.getBoundingClientRect(), card = each.closest(".card")?.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5 || (card && box.right > card.right + 0.5));
}).map((each) => each.outerHTML.slice(0, 200))"""
OVERLAPS = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].map((each) => [each.textContent, each.getBoundingClientRect()]);
  return texts.flatMap(([a, x], i) => texts.slice(i + 1).filter(([b, y]) => x.left < y.right - 1 && y.left < x.right - 1
    && x.top < y.bottom - 3 && y.top < x.bottom - 3).map(([b]) => `${svg.getAttribute("aria-label")}: ${a} / ${b}`));
})"""
# The least contrast of a text with what is behind it (WCAG: 4.5).
CONTRAST = """(() => {
  const light = (paint) => paint.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = light(getComputedStyle(document.querySelector(".card")).backgroundColor);
  const kinds = ["h2", "p", "th", "td", "span", "div", "text:not(.on)"].map((kind) => `.card ${kind}`);
  const texts = [...document.querySelectorAll(kinds.join())].filter((each) => each.textContent);
  return Math.min(...texts.map((each) => [getComputedStyle(each), each.namespaceURI.endsWith("svg")])
    .map(([style, drawn]) => light(drawn ? style.fill : style.color))
    .map((paint) => (Math.max(paint, behind) + 0.05) / (Math.min(paint, behind) + 0.05)));
})()"""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_browser_shows_the_page(
    browser: Browser, count: int, scheme: str, width: int, runs: Path, tmp_path: Path
) -> None:
    names = ["first", "a second one, whose name is rather long for a narrow screen"][:count]
    browser.open(page(tmp_path, *(runs / f"{name}.jsonl" for name in names)), width, scheme)
    browser.value("document.getElementById('more').open = true; 0")
    wrong = ("Runtime.exceptionThrown", "Log.entryAdded")
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert [event for event in browser.events if event.get("method") in wrong] == []
    assert all(url.startswith("file:") and url.endswith("page.html") for url in asked) and asked
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(CUT) == [] and browser.value(OVERLAPS) == []
    assert browser.value(CONTRAST) >= 4.5
    titles = browser.value("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
    expected = ["Runs", "Loss", "Gradient norm, before clipping", "Rate", "Throughput (tokens/s)"]
    expected += ["Where a step goes (mean)", "Memory of the first rank, by kind", "Warnings"]
    assert set(expected) <= set(titles)
    charts = browser.value("document.querySelectorAll('svg').length")
    assert charts >= 9 and browser.value("document.querySelectorAll('path[data-run]').length") >= count * 7
    shown = browser.value("document.body.innerText")
    assert all(name in shown for name in names) and "inf or NaN in a gradient" in shown
    assert "<b>with marks</b>" in shown and browser.value("document.querySelectorAll('b').length") == 0
    backs = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 27)"}
    assert browser.value("getComputedStyle(document.body).backgroundColor") == backs[scheme]
    assert len(browser.picture()) > 20_000
