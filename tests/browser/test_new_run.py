"""The page "New run" in a real browser: filled in, checked, and filled in wrongly in every field. The story starts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers.browser import check_no_overflow, open_page
from helpers.looks import check_looks
from helpers.paths import ROOT as REPOSITORY
from playwright.sync_api import Locator, Page, expect

from lorashard.runtime.disk import show_bytes

CPU_BUDGET_S = (
    180  # a process that plans and counts, one that checks, and a page that draws its fields anew as one types
)
WORKER_MS = 150_000  # it loads torch first
# Whether the text of an element has a contrast of 4.5 to what is behind it, layers of color over one another (WCAG 2).
_IS_READABLE = """name => {
  const read = color => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return {rgb: [r, g, b], a}; };
  const over = (top, below) => top.rgb.map((value, i) => value * top.a + below[i] * (1 - top.a));
  const layers = [];
  const element = document.querySelector(name);
  for (let part = element; part; part = part.parentElement) layers.push(read(getComputedStyle(part).backgroundColor));
  const back = layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  const light = rgb => rgb.map(value => value / 255).map(value =>
    value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4
  ).reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const pair = [light(over(read(getComputedStyle(element).color), back)), light(back)].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05) >= 4.5;
}"""
# Leaves a field in the moment of a key, before its list opens, as a fast Tab does; ends when the list has opened.
_LEAVE_FAST = """async name => {
  const field = document.querySelector(`#option-${name} input`);
  field.focus();
  field.dispatchEvent(new KeyboardEvent('keydown', {key: 'a', bubbles: true}));
  document.querySelector('#run-name').querySelector('textarea, input').focus();
  for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
}"""
BASE, ROWS = "examples/demo/base", "examples/demo/train.jsonl"


@pytest.fixture
def form(page) -> Page:
    """The page, filled in by nobody yet."""
    page.goto("favicon.ico")
    page.evaluate("localStorage.clear()")
    open_page(page, "new")
    expect(page.locator("#problems")).to_contain_text("Still missing")
    return page


def find_input(page: Page, name: str) -> Locator:
    """Return what is typed into, of an option's field."""
    return page.locator(f"#option-{name}").locator("textarea, input").first


def type_in(page: Page, name: str, text: str) -> None:
    """Write into a field, as by pasting, and leave it."""
    find_input(page, name).fill(text)
    find_input(page, name).press("Tab")


def fill_demo(page: Page, **others: str) -> None:
    """Fill in the demo: two ranks, few steps."""
    given = {"model_name_or_path": BASE, "dataset": ROWS, "cpu": "2", "max_length": "128"} | others
    page.locator("#more textarea").fill("max_steps: 3")
    for name, text in given.items():
        type_in(page, name, text)


def choose_option(page: Page, name: str) -> None:
    """Find an option by its name, and add it to the form."""
    page.locator("#find-option input").press_sequentially(f"{name}:")  # the list follows keys alone
    page.get_by_role("option", name=f"{name}:").first.click()


def choose_file(page: Page, button: str, path: Path) -> None:
    """Press a button that asks for a file, and choose one."""
    with page.expect_file_chooser() as chooser:
        page.locator(f"#{button}").click()
    chooser.value.set_files(path)


def read_code(page: Page, elem_id: str) -> str:
    """Return the text of a box of code."""
    return page.locator(f"#{elem_id} .cm-content").inner_text()


@pytest.mark.slow
def test_a_person_sees_the_plan_the_rows_and_the_command(form, ui_server):
    """Catches a form whose plan, preview, check or command is not that of its options, or shows a path of this machine
    where a shorter one leads there; a plan of what was typed before; a mistake of the data that is told nowhere; a plan
    or a Start that is out of sight where somebody scrolls; supervised tokens that cannot be read in the dark; and a bar
    whose click takes another placement, or leaves its resident layers behind."""
    page = form
    fill_demo(page, dataset="examples/demo/nothing.jsonl", max_length="")
    expect(page.locator("#preview-status")).to_contain_text("nothing.jsonl", timeout=WORKER_MS)
    expect(page.locator("#problems")).to_contain_text("nothing.jsonl")
    expect(page.locator("#start")).to_have_class(re.compile("secondary"))
    type_in(page, "dataset", ROWS)
    type_in(page, "max_length", "128")
    expect(page.locator("#plan-status")).to_contain_text("fits on each", timeout=WORKER_MS)
    expect(page.locator("#plan-chart .barlayer .trace")).to_have_count(5)  # with what stays free
    rank = find_input(page, "lora_r")
    rank.focus()
    for text in ("1", "1280"):
        rank.fill(text)
    expect(rank).to_have_value("1280")
    options = {"model_name_or_path": BASE, "cpu": 2, "max_length": 128, "max_steps": 3, "lora_r": 1280}
    plan = ui_server.connect().predict(api_name="/plan", options=options)
    wanted = f"fits, {show_bytes(plan['rows'][plan['chosen']]['peak_bytes'])}, "
    expect(page.locator("#plan-chart.stale")).to_have_count(0, timeout=WORKER_MS)
    expect(page.locator("#plan-chart")).to_contain_text(wanted, timeout=WORKER_MS)
    rank.fill("")
    find_input(page, "quantization").click()
    page.get_by_role("option", name="nf4").click()
    expect(page.locator("#plan-notes")).to_contain_text("quantized to nf4", timeout=WORKER_MS)
    expect(page.locator("#plan-chart .barlayer .trace")).to_have_count(6)  # what weights are unpacked to
    expect(page.locator("#model-note")).to_contain_text(re.compile(r" parameters, .* in examples/demo/base\s*$"))
    expect(page.locator("#preview-status")).to_contain_text("Format: messages", timeout=WORKER_MS)
    expect(page.locator("#estimate")).to_contain_text("Expected time", timeout=WORKER_MS)
    assert page.locator("#estimate .value").all_inner_texts()[:3] == ["4,800", "about 140,000", "3"]
    first = page.locator("#preview .example").first
    expect(first).to_contain_text("train.jsonl line 1")
    expect(first).to_contain_text("63 tokens, 31 supervised")
    expect(first.locator("mark")).to_have_count(1)
    find_input(page, "model_name_or_path").click()
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 1440, "height": 900})
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height > 1500  # there is something to scroll
    for place in (0, height // 3, height):
        page.evaluate("place => window.scrollTo(0, place)", place)
        for name, share in {"#start": 1, "#problems": 1, "#plan-status": 1, "#plan-chart": 0.4}.items():
            expect(page.locator(name)).to_be_in_viewport(ratio=share - 0.01)
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("window.scrollTo(0, 0)")
    expect(page.locator("#start")).to_be_in_viewport(ratio=0.99)
    page.get_by_role("heading", name="New run").click()  # a list of suggestions that is open is in the picture's way
    expect(page.locator("#problems")).to_contain_text("\u2713 All options are valid.")
    expect(page.locator("#start")).to_have_class(re.compile("primary"))
    expect(page.locator(".stale:visible")).to_have_count(0, timeout=WORKER_MS)  # what is of other options is dimmed
    check_looks(page)
    for color_scheme in ("light", "dark"):
        page.emulate_media(color_scheme=color_scheme)
        for place in ("mark", ".context", ".counts .subdued"):
            page.wait_for_function(_IS_READABLE, arg=f"#preview .example {place}")

    words = shlex.split(read_code(page, "command"))
    assert words[:2] == ["lorashard", "finetune"]
    assert words[words.index("--output_dir") + 1] == "runs/base-train"
    assert words[words.index("--quantization") + 1] == "nf4" and "quantization: nf4" in read_code(page, "yaml")

    bars = page.locator("#plan-chart .barlayer .trace").first.locator(".point path")  # of the base at rest
    lines = page.locator("#plan-take label").all_inner_texts()
    expect(bars).to_have_count(len(lines))
    wanted = next(place for place, line in enumerate(lines) if line.startswith("shard"))
    box = bars.nth(wanted).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(find_input(page, "placement")).to_have_value("shard")
    expect(find_input(page, "resident_layers")).to_have_value(re.compile(r"^\d+$"))
    expect(page.locator("#yaml .cm-content")).to_contain_text(re.compile(r"placement: shard.*resident_layers: \d"))


@pytest.mark.slow
def test_everything_is_checked_first(form):
    """Catches a traceback, or silence, where lorashard finds a mistake only by reading the files."""
    page = form
    fill_demo(page, model_name_or_path="examples/demo/nowhere/x", dataset="examples/demo/nothing.jsonl")
    for place in ("#model-note", "#plan-status"):
        expect(page.locator(place)).to_contain_text("nowhere/x", timeout=WORKER_MS)
    type_in(page, "model_name_or_path", BASE)
    page.locator("#check").click()
    expect(page.locator("#checked textarea")).to_have_value(re.compile(r"✕ .*nothing\.jsonl"), timeout=WORKER_MS)
    type_in(page, "dataset", ROWS)
    page.locator("#check").click()
    expect(page.locator("#checked textarea")).to_have_value(
        re.compile(r"✓ dataset: 4800 rows;(.*\n)*✓ All checks passed\."), timeout=WORKER_MS
    )
    expect(page.locator("#checked.stale")).to_have_count(0)
    type_in(page, "lora_r", "8")
    expect(page.locator("#checked.stale")).to_have_count(1)


@pytest.mark.slow  # what is said of each field is checked without a browser too
def test_a_mistake_is_told_at_its_field_and_nothing_starts(form, ui_server):
    """Catches a mistake that is told elsewhere than at its field, and a start in spite of it."""
    page = form
    before = sorted(ui_server.root.iterdir())
    fill_demo(page)
    for field, right, wrong, said in (
        (page.locator("#option-lora_r"), "", "x", "lora_r: "),
        (page.locator("#option-dataset"), ROWS, "../rows.jsonl", "--allow"),
        (page.locator("#run-name"), "", "../up", "name of a"),
    ):
        box = field.locator("textarea, input").first
        for text, is_wrong in ((wrong, True), (right, False)):
            box.fill(text)
            box.press("Tab")
            if is_wrong:
                expect(field).to_have_class(re.compile("wrong"))
                expect(field).to_contain_text(said)
                page.locator("#start").click()
                expect(page.locator("#problems")).to_contain_text(said)
        expect(field).not_to_have_class(re.compile("wrong"))
    expect(page.locator("#problems")).to_contain_text("are valid")
    assert sorted(ui_server.root.iterdir()) == before


@pytest.mark.slow  # the form's texts are read and written without a browser too
def test_options_are_loaded_copied_and_uploaded(form, ui_server, tmp_path):
    """Catches options that are lost on the way in, a mistake without its line, a copy of more than was asked, and an
    upload that is gone when the run reads it."""
    page = form
    choose_file(page, "load-yaml", REPOSITORY / "examples/demo/demo.yaml")
    expect(page.get_by_text("from demo.yaml")).to_be_visible()
    expect(find_input(page, "learning_rate")).to_have_value("0.005")
    expect(page.locator("#problems")).to_contain_text("are valid")
    expect(page.locator("#more textarea")).to_have_value(re.compile("warmup_steps: 10\n(.*\n)*save_strategy: 'no'"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("lora_r: 8\nlora_q: 3\n")
    choose_file(page, "load-yaml", wrong)
    expect(page.get_by_text("wrong.yaml, line 2: lora_q")).to_be_visible()
    expect(find_input(page, "learning_rate")).to_have_value("0.005")

    choose_file(page, "upload-dataset", REPOSITORY / ROWS)
    expect(page.get_by_text("train.jsonl is stored")).to_be_visible()
    (kept,) = (ui_server.root / ".uploads").glob("*/*")
    expect(find_input(page, "dataset")).to_have_value(str(kept.relative_to(ui_server.root.parent)))
    expect(page.locator("#problems")).to_contain_text("are valid")
    assert kept.read_bytes() == (REPOSITORY / ROWS).read_bytes()

    run = ui_server.root / "earlier run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"model_name_or_path: {BASE}\ndataset: {ROWS}\nlora_r: 7\noutput_dir: x\nlora_alpha: 32\n"
        "sweep: {grid: {learning_rate: [1e-3, 2e-3], use_dora: [true, false]}}\n"
    )
    open_page(page, "new?from=earlier%20run")
    expect(find_input(page, "lora_r")).to_have_value("7")
    expect(find_input(page, "learning_rate")).to_have_value("0.001, 0.002")
    expect(find_input(page, "use_dora")).to_have_value("true, false")
    expect(page.locator("#problems")).to_contain_text("4 jobs")
    type_in(page, "use_dora", "true")
    expect(page.locator("#problems")).to_contain_text("2 jobs")
    type_in(page, "use_dora", "false, true")
    type_in(page, "learning_rate", "1, 2, 3")
    expect(page.locator("#problems")).to_contain_text("6 jobs")
    expect(page.locator("#problems")).to_contain_text("named base-train")
    assert "output_dir" not in read_code(page, "yaml") and "lora_alpha" not in read_code(page, "yaml")
    open_page(page, "new?from=../../etc")
    expect(page.get_by_text("name of a")).to_be_visible()


@pytest.mark.slow
def test_the_form_is_kept_until_it_is_cleared(form):
    """Catches a form that a reload empties, or brings back after it was cleared; a recipe that is taken once more by
    whoever comes past its list, which undoes what was changed; and a list that stays open over the fields below where
    Tab leaves it before it has opened."""
    page = form
    recipes = page.locator("#clone input").first
    recipes.click()
    page.get_by_role("option", name=re.compile("^Recipe demo")).first.click()
    expect(find_input(page, "learning_rate")).to_have_value("0.005")
    type_in(page, "learning_rate", "0.25")
    recipes.focus()
    for key in ("Tab", "Shift+Tab", "Tab"):
        page.keyboard.press(key)
    type_in(page, "lora_r", "8")
    yaml = page.locator("#yaml .cm-content")
    expect(yaml).to_contain_text("lora_r: 8")
    expect(yaml).to_contain_text("learning_rate: 0.25")

    find_input(page, "dataset").focus()
    page.keyboard.press("a")
    page.keyboard.press("Tab")
    page.locator("#find-option input").focus()
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#run-name textarea, #run-name input")).to_be_focused()
    page.evaluate("() => new Promise(requestAnimationFrame)")
    expect(page.get_by_role("listbox")).to_have_count(0)
    for name in ("dataset", "quantization"):
        page.evaluate(_LEAVE_FAST, name)
        expect(page.get_by_role("listbox")).to_have_count(0)

    page.reload()
    expect(find_input(page, "learning_rate")).to_have_value("0.25")
    expect(page.locator("#more textarea")).to_have_value(re.compile("warmup_steps: 10"))
    expect(yaml).to_contain_text("lora_r: 8")
    page.locator("#clear").click()
    expect(page.locator("#problems")).to_contain_text("Still missing")
    expect(yaml).not_to_contain_text("learning_rate")  # fields become empty one after the other
    page.reload()
    expect(page.locator("#problems")).to_contain_text("Still missing")
    expect(find_input(page, "learning_rate")).to_have_value("")


@pytest.mark.slow
def test_another_method_brings_its_own_options(form):
    """Catches fields that the method has not, defaults of another method, and an option lost without a word."""
    page = form
    fill_demo(page)
    choose_option(page, "packing_strategy")
    expect(page.locator("#option-packing_strategy input")).to_be_focused()
    find_input(page, "method").click()
    page.get_by_role("option", name="dpo").click()
    expect(page.locator("#option-packing_strategy")).to_be_hidden()
    expect(page.locator("#problems")).to_contain_text("named base-train-dpo")
    expect(find_input(page, "learning_rate")).to_have_attribute("placeholder", "1e-05")
    expect(page.locator("#preview-status")).to_contain_text("dpo", timeout=WORKER_MS)
    choose_option(page, "label_smoothing")
    expect(page.locator("#more textarea")).to_have_value("max_steps: 3\nlabel_smoothing: 0.0")
    expect(page.locator("#more textarea")).to_be_focused()
    find_input(page, "method").click()
    page.get_by_role("option", name="grpo").click()
    expect(page.locator("#more.wrong")).to_contain_text("more options, line 2: label_smoothing")
    expect(page.locator("#option-max_length.wrong")).to_contain_text("grpo")


@pytest.mark.slow
def test_the_form_is_filled_in_by_keyboard_on_a_phone(form):
    """Catches a field that Tab does not reach or does not leave, and a page that must be pushed sideways."""
    page = form
    page.set_viewport_size({"width": 390, "height": 844})
    find_input(page, "model_name_or_path").focus()
    keyboard = page.keyboard
    keyboard.type(BASE)
    keyboard.press("Enter")
    reached = []
    for _ in range(60):
        keyboard.press("Tab")
        name = page.evaluate("document.activeElement.closest('[id^=option-], #start, #run-name')?.id ?? ''")
        if name and name not in reached:
            reached.append(name)
            if name == "option-dataset":
                keyboard.type(ROWS)
                keyboard.press("Enter")
            if name == "option-lora_r":
                keyboard.type("8")
            if name == "start":
                break
    assert reached.index("option-dataset") < reached.index("option-lora_r") < reached.index("start")
    expect(page.locator("#problems")).to_contain_text("are valid")
    expect(page.locator("#yaml .cm-content")).to_contain_text("lora_r: 8")
    check_no_overflow(page)
