"""Measure how long the web UI takes from a click to its answer, for the actions of every page, in a real browser.

    python benchmarks/ui_actions.py                       measure, write a record, print its table
    python benchmarks/ui_actions.py --table RECORD.json   print the table of a record

A real server over the demo, and Chromium by Playwright. The clock runs from before the click until the page shows the
answer, looked for at every frame; Playwright's own part is about 50 ms. What can be repeated is; what loads torch or a
model is measured once a round. Before any tab is open, the server's idle share of a core is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, describe_environment, format_table, run_command, summarize

IDLE_S = 20
ESTIMATING_MS = 650  # after a plan: half a second for somebody who types on, then the estimate is made
WAIT_MS = 240_000
DEMO = {"model_name_or_path": "examples/demo/base", "dataset": "examples/demo/train.jsonl", "cpu": "1"}
DEMO |= {"max_length": "128", "per_device_train_batch_size": "1"}
MORE = "max_steps: 2000\ndtype: float32\nlogging_steps: 1\nmax_train_samples: 400\nactivation_checkpointing: false"
TRAIN = "--config examples/demo/demo.yaml --cpu 1 --dtype float32 --max_steps 12 --logging_steps 1 --save_steps 6"
TRAIN += " --warmup_steps 2 --output_dir runs/first --eval_strategy no --eval_dataset null"
CURVE = ".chart .scatterlayer .trace"
# The visible elements of a selector hold a text; a field's text is its value.
SHOWS = """([selector, text]) => [...document.querySelectorAll(selector)].some(
  (one) => one.getClientRects().length && String(one.value || one.innerText || one.textContent).includes(text))"""


class Stopwatch:
    """Times actions in a tab; seconds by page and action, in the order in which they were first done."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def measure(self, name: str, act: Callable[[], Any], selector: str, text: str = "") -> None:
        """Do something, and wait until a visible element has a text."""
        begin_s = time.perf_counter()
        act()
        self.page.wait_for_function(SHOWS, arg=[selector, text])
        self.seconds[name].append(time.perf_counter() - begin_s)


def main() -> None:
    args = parse_args()
    run_command(args, "ui_actions-demo", measure, make_table, lambda job: None)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of what takes no process and no model")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print what a record says, measure nothing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train the demo shortly, serve it, and do what a person does."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(ROOT / "examples/demo", place / "examples/demo")
        run_lorashard(place, "finetune", *TRAIN.split())
        shutil.copytree(place / "runs/first", place / "runs/second")
        with serve(place) as (url, server), sync_playwright() as playwright:
            idle_share = measure_idle(server)
            path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
            words = ["--no-sandbox", "--disable-dev-shm-usage"]  # the only pages are this project's
            browser = playwright.chromium.launch(executable_path=path, args=words)
            page = browser.new_page(base_url=url.partition("?")[0], viewport={"width": 1440, "height": 900})
            page.set_default_timeout(WAIT_MS)
            watch = Stopwatch(page)
            watch.measure("Runs: open, first visit", lambda: page.goto(url), "tbody a", "first")
            for _ in range(args.rounds):
                visit_runs(watch)
                visit_run(watch)
                visit_compare(watch)
                visit_export(watch)
            visit_chat(watch)
            start_a_run(watch, args.rounds)
            version = browser.version
            browser.close()
        load = os.getloadavg()
    return {
        "benchmark": "ui_actions",
        "config": {"rounds": args.rounds, "idle_s": IDLE_S, "viewport": [1440, 900]},
        "environment": describe_environment() | {"chromium": version, "load_average": load},
        "idle_share": idle_share,
        "seconds": {name: summarize(values) | {"times": len(values)} for name, values in watch.seconds.items()},
    }


def run_lorashard(place: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "lorashard", *words], cwd=place, check=True, stdout=sys.stderr)


@contextmanager
def serve(place: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the runs of a folder, and end the server and all that it has started; yields its address and process."""
    command = [sys.executable, "-m", "lorashard", "ui", "--port", "0", "--allow", "examples"]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def measure_idle(server: psutil.Process) -> float:
    """Return the share of a core that a server takes that nobody asks."""
    time.sleep(3)  # what it does after its start
    begin, begin_s = server.cpu_times(), time.monotonic()
    time.sleep(IDLE_S)
    end = server.cpu_times()
    return (end.user + end.system - begin.user - begin.system) / (time.monotonic() - begin_s)


def visit_runs(watch: Stopwatch) -> None:
    page = watch.page
    watch.measure("Runs: open", lambda: page.goto(""), "tbody a", "second")
    watch.measure("Runs: sort", lambda: page.locator("[data-sort=loss]").click(), "th[aria-sort]", "loss")
    page.get_by_label("Filter").fill("first")
    page.wait_for_function("document.querySelectorAll('tbody a').length === 1")
    watch.measure("Runs: filter", lambda: page.get_by_label("Filter").fill("sec"), "tbody a", "second")


def visit_run(watch: Stopwatch) -> None:
    page = watch.page
    watch.measure("Run: open, with its curves", lambda: page.goto("run?name=first"), CURVE)
    for tab, selector in (("Ranks", "table tbody td"), ("Logs", "[role=log]"), ("Set-up", ".cm-content")):
        watch.measure(f"Run: tab {tab}", page.get_by_role("tab", name=tab).click, selector)
    page.get_by_role("tab", name="Logs").click()
    search = page.get_by_label("Search")
    watch.measure("Run: search the log", lambda: search.fill("not there"), "[role=log]", "No line contains")


def visit_compare(watch: Stopwatch) -> None:
    page = watch.page
    watch.measure(
        "Compare: open, with its curves", lambda: page.goto("compare?runs=first,second"), ".chart .scatterlayer .trace"
    )
    tokens = page.get_by_label("tokens", exact=True)
    watch.measure("Compare: over tokens", tokens.check, ".chart .xtitle", "tokens")


def visit_export(watch: Stopwatch) -> None:
    page = watch.page
    button = page.get_by_role("button", name="Download the adapter (")
    watch.measure("Export: open", lambda: page.goto("export?run=first"), "button", "Download the adapter (")
    begin_s = time.perf_counter()
    with page.expect_download() as download:
        button.click()
    download.value.path()
    watch.seconds["Export: download the adapter"].append(time.perf_counter() - begin_s)


def visit_chat(watch: Stopwatch) -> None:
    page = watch.page
    watch.measure("Chat: open", lambda: page.goto("chat?run=first"), "button", "Send")
    for name in ("first answer begins, the model is loaded", "answer begins"):
        page.get_by_label("Message").fill("Book lunch with Anna on Friday")
        said = "Chat: " + name
        watch.measure(said, page.get_by_role("button", name="Send").click, ".talk .turn-model .said")
        page.wait_for_function("!document.querySelector('button:disabled')?.innerText.includes('Send')")
        page.get_by_role("button", name="Reset").click()
        page.wait_for_function("document.querySelectorAll('.talk .turn-model').length === 0")
    page.get_by_role("button", name="Unload").click()


def start_a_run(watch: Stopwatch, rounds: int) -> None:
    """Fill in the form, start a run, follow, save, stop, resume and delete it."""
    page = watch.page
    for _ in range(rounds):
        watch.measure("New run: open", lambda: page.goto("new"), "#problems", "missing")
    page.locator("#more textarea").fill(MORE)
    for option, text in DEMO.items():
        type_in(page, option, text)
    watch.measure("New run: first plan", lambda: None, "#plan-status", "fits on each")
    watch.measure("New run: first examples", lambda: None, "#preview-status", "Format: ")
    rest_ms = {"edit to new plan": 0, "edit while the time is estimated, to new plan": ESTIMATING_MS}
    for rank, (name, wait_ms) in enumerate([*rest_ms.items()] * rounds, 2):
        page.wait_for_timeout(wait_ms)
        begin_s = time.perf_counter()
        act, text = partial(type_in, page, "lora_r", str(rank)), f"lora_r: {rank}"
        watch.measure("New run: edit to YAML", act, "#yaml", text)
        page.wait_for_function("document.querySelector('#plan-chart.stale')")
        page.wait_for_function("!document.querySelector('#plan-chart.stale')")
        watch.seconds["New run: " + name].append(time.perf_counter() - begin_s)
    watch.measure("New run: check everything", page.locator("#check").click, "#checked textarea", "\u2713")
    page.locator("#run-name textarea, #run-name input").first.fill("third")
    page.wait_for_function(SHOWS, arg=["#problems", "third"])
    watch.measure("New run: start to the run's page", page.locator("#start").click, ".run-title", "third")
    state = ".run-title .state"
    watch.measure("Run: started to first step", lambda: None, ".bar-sentence", "step ")
    press = {
        name: page.get_by_role("button", name=name, exact=True) for name in ("Save now", "Stop and save", "Resume")
    }
    watch.measure("Run: save now", press["Save now"].click, ".note", "Saved: checkpoint-")
    watch.measure("Run: stop and save", press["Stop and save"].click, state, "stopped")
    page.wait_for_function("![...document.querySelectorAll('button')].find(b => b.innerText === 'Resume').disabled")
    watch.measure("Run: resume to running", press["Resume"].click, state, "running")
    press["Stop and save"].click()
    page.wait_for_function(SHOWS, arg=[state, "stopped"])
    delete = page.get_by_role("button", name="Delete", exact=True)
    page.wait_for_function("![...document.querySelectorAll('button')].find(b => b.innerText === 'Delete').disabled")
    delete.click()
    page.get_by_label("type its name").fill("third")
    watch.measure("Run: delete", page.get_by_role("button", name="Delete permanently").click, ".note", "third")


def type_in(page: Any, option: str, text: str) -> None:
    field = page.locator(f"#option-{option}").locator("textarea, input").first
    field.fill(text)
    field.press("Tab")


def make_table(record: dict[str, Any]) -> str:
    """Return what a person waits for."""
    rows = [
        (
            name,
            f"{found['median'] * 1e3:,.0f}",
            f"{found['min'] * 1e3:,.0f}",
            f"{found['max'] * 1e3:,.0f}",
            str(found["times"]),
        )
        for name, found in record["seconds"].items()
    ]
    table = format_table(("page: action", "median, ms", "least", "most", "times"), rows)
    hardware, load = record["environment"]["hardware"], record["environment"]["load_average"]
    machine = f"{hardware['cores']} cores of {hardware['cpu']}, load average {load[0]:.1f}"
    return f"{table}\n\nThe idle server took {record['idle_share']:.2%} of a core. {machine}."


if __name__ == "__main__":
    main()
