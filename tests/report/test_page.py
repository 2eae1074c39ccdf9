"""The page of a report: whole, harmless, and usable in a browser with a mouse, a keyboard, on a phone and on paper."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from trl_opsd.cli.main import app
from trl_opsd.report.page import charts, facts, page, picture, write
from trl_opsd.report.records import Recorded, append, recorded_in, state_file, tell
from trl_opsd.report.samples import Sample, Token

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror=alert(1)>"\' &amp; {{ 7 * 7 }}'
LOG = [
    {"step": 0, "eval_divergence/mean": 0.5, "eval_reward": 0.25, "eval_rewards/right/mean": 0.25, "eval_runtime": 1.0},
    *(
        {
            "step": step,
            "loss": 0.1,
            "divergence/mean": 1 / step,
            "divergence/position_0": 1 / step,
            "divergence/position_9": 2 / step,
            "entropy/student": 2.0,
            "time/complete": 0.5,
            "learning_rate": 1e-6,
            "grad_norm": float("nan"),
        }
        for step in range(1, 101)
    ),
    {"step": 100, "eval_divergence/mean": float("nan"), "eval_reward": 0.75, "eval_runtime": 1.0},
    {"step": 100, "train_runtime": 125.0, "train_loss": 0.1},
]


def sample(*texts: str, prompt: str = "2+2=") -> Sample:
    tokens = [Token(text, 0.5 * place, 0.25, 0.5, (("é", 0.75), ("\n", 0.2))) for place, text in enumerate(texts)]
    return Sample(prompt, None, (*tokens, Token(" tool")), is_cut=True)


RECORDED = [
    Recorded(0, "eval", (sample("4", " is", "\n", "right"),)),
    Recorded(0, "train", (sample("a", prompt="first"),)),
    Recorded(99, "train", (replace(sample(HOSTILE, prompt=HOSTILE), answers=((1, HOSTILE),)),)),
    Recorded(100, "eval", (sample("5", ""),)),
]


@pytest.mark.quick
def test_curves_are_numbers_of_the_log():
    found = {one.title: one for one in charts(LOG)}
    assert list(found) == [
        "Divergence",
        "Divergence by position",
        "Reward",
        "Entropy",
        "Seconds of a step",
        "Learning rate",
    ]
    divergence = {one.name: one.points for one in found["Divergence"].curves}
    assert divergence == {
        "eval": ((0, 0.5),),  # what is not finite is no point
        "training": tuple((step, 1 / step) for step in range(1, 101)),
    }
    places = {one.name: one.points for one in found["Divergence by position"].curves}
    assert places == {"step 1": ((1, 1.0), (10, 2.0)), "step 100": ((1, 0.01), (10, 0.02))}
    assert [one.name for one in found["Reward"].curves] == ["eval", "right, eval"]
    rows = found["Divergence"].rows
    assert len(rows) <= 40
    assert rows[0] == (0, [0.5, None])
    assert rows[-1] == (100, [None, 0.01])
    assert ("Time since the last start", "2 min 5 s") in facts(LOG)
    assert ("Reward, eval", "0.250 → 0.750") in facts(LOG)


@pytest.mark.quick
def test_picture_draws_every_curve_and_loads_nothing():
    for chart in charts(LOG):
        svg = picture(chart)
        ET.fromstring(svg)
        assert not re.search(r"(href|src)=|url\((?!#)", svg)
        lines = re.findall(r'aria-roledescription="line mark"', svg)
        assert len(lines) == len(chart.curves), chart.title
        assert chart.curves[0].name in svg


class Elements(HTMLParser):
    """Collects what the elements of a page ask for."""

    def __init__(self):
        super().__init__()
        self.asks_for: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.asks_for += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


@pytest.mark.quick
def test_text_of_models_is_escaped():
    made = page(HOSTILE, LOG, RECORDED)
    assert made.count("<script") == 1
    assert "onerror=alert(1)>" not in made
    assert "<img src=x" not in made
    assert made.count("{{ 7 * 7 }}") == 5, "the title twice, prompt, token and a tool's answer"
    elements = Elements()
    elements.feed(made)
    assert {one.partition(",")[0] for one in elements.asks_for} == {"data:image/svg+xml;base64"}
    assert not re.search(r"@import|url\(", made)


@pytest.mark.quick
def test_tool_answers_stand_between_turns_and_are_no_tokens():
    acting = replace(sample("a", "b", "c"), answers=((2, "\n<|im_start|>user\n7\n"),))
    made = page("run", [], [Recorded(0, "eval", (sample("a", "b", "c"),)), Recorded(9, "eval", (acting,))])
    plain, conversation = made.split('class="written"')[1:]
    assert re.findall(r'aria-label="(.*?), arrow', plain) == ["Completion at step 0: 4 tokens"]
    assert "<h5>" not in plain
    kinds = r'<h5>(.*?)</h5>|aria-label="(.*?), arrow|role="option".*?>(.*?)</span>|<pre.*?>\n(.*?)</pre>|(…)'
    assert ["".join(one) for one in re.findall(kinds, conversation, flags=re.DOTALL)] == [
        *("assistant, turn 1", "Turn 1 at step 9: 2 tokens", "a", "b"),
        *("tool", "&lt;|im_start|&gt;user\n7"),
        *("assistant, turn 2", "Turn 2 at step 9: 2 tokens", "c", " tool", "…"),
    ]


@pytest.mark.quick
def test_first_and_last_samples_are_paired_if_prompts_are_equal():
    made = page("run", LOG, RECORDED, {"student": "<b>small</b>"})
    of_evaluation, of_training = made.split("<h3>")[1:]
    assert (of_evaluation.count('"sample pair"'), "show different prompts" in of_evaluation) == (1, False)
    assert (of_training.count('"sample pair"'), "show different prompts" in of_training) == (0, True)
    assert "<dt>student</dt><dd>&lt;b&gt;small&lt;/b&gt;</dd>" in made
    assert "Models and settings" not in page("run", LOG, RECORDED)


@pytest.mark.quick
def test_phases_are_named_as_in_terminal_and_charts_share_decimals():
    found = {one.title: one for one in charts(LOG)}
    assert [one.name for one in found["Seconds of a step"].curves] == ["generate"]
    assert [found["Divergence"].shown(value) for value in (1.0, 0.01, None)] == ["1.000", "0.010", "–"]
    assert found["Learning rate"].shown(1e-6) == "1.00e-06"


def test_recorded_samples_round_trip_and_damaged_line_is_named(tmp_path):
    for one in RECORDED:
        append(tmp_path, one)
    assert recorded_in(tmp_path) == RECORDED
    append(tmp_path, Recorded(7, "train", (Sample("x", "a", (Token("y", float("inf"), 0.1, 0.0),), False),)))
    assert recorded_in(tmp_path)[-1].samples[0].tokens[0] == Token("y", None, 0.1, 0.0)
    file = tmp_path / "report" / "samples.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-9])  # the run was killed while it wrote
    assert len(recorded_in(tmp_path)) == 4
    for wrong in ('{"step": 1}', '{"step": "1", "split": "a", "samples": []}', "[]", "null", "{", '"x"'):
        file.write_text(f"{wrong}\n{whole}")
        with pytest.raises(ValueError, match=r"Line 1 of .*samples\.jsonl is not a valid recording of a run"):
            recorded_in(tmp_path)


def test_images_precede_their_prompt_and_tell_equal_prompts_apart(tmp_path):
    ends = [Recorded(step, "eval", tuple(Sample("x", None, (), False, (one,)) for one in "ab")) for step in (0, 9)]
    for one in ends:
        append(tmp_path, one)
    assert recorded_in(tmp_path) == ends
    made = page("run", LOG, recorded_in(tmp_path))
    assert made.count('"sample pair"') == 2
    assert [text.count('base64,a"') for text in made.split('<pre class="prompt"')] == [1, 0, 0]
    hostile = page("run", LOG, [Recorded(0, "eval", (Sample("x", None, (), False, (HOSTILE,)),))])
    assert "onerror=alert(1)>" not in hostile
    file = tmp_path / "report" / "samples.jsonl"
    file.write_text(file.read_text().replace(', "images": ["a"], "answers": []', ""))
    assert recorded_in(tmp_path)[0].samples[0] == Sample("x", None, (), False), "recorded by an earlier version"


def test_report_command_accepts_any_folder_with_a_log(make_trainer, tmp_path):
    def asked(*arguments):
        return CliRunner().invoke(app, ["report", *map(str, arguments)])

    empty = asked(tmp_path)
    assert (empty.exit_code, "train with `report=True`, or, for curves alone, save checkpoints" in empty.output) == (
        2,
        True,
    )
    missing = asked(tmp_path / "nowhere")
    assert (missing.exit_code, "no such folder" in missing.output) == (2, True)

    run = tmp_path / "run"
    trainer = make_trainer(output_dir=str(run), max_steps=2, logging_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()  # without `report`
    done = asked(run)
    assert (done.exit_code, done.stdout.strip()) == (0, str(run / "report.html"))
    text = (run / "report.html").read_text()
    assert "<figure>" in text
    assert 'class="tokens"' not in text
    elsewhere = tmp_path / "one.html"
    assert asked(run / "checkpoint-1", "-o", elsewhere).exit_code == 0
    assert "<dd>1</dd>" in elsewhere.read_text(), "the log of that checkpoint"
    state = run / "checkpoint-2" / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 2, "log_history": [{"loss": 1}]}))
    assert asked(run / "checkpoint-2").exit_code == 2
    unwritable = asked(run / "checkpoint-1", "-o", tmp_path / "no" / "such" / "folder.html")
    assert unwritable.exit_code == 2


def run_with_log(folder, values, **said):
    log = [{"step": step, "loss": one} for step, one in enumerate(values, 1)]
    log += [{"step": step, "eval_loss": one / 2, "eval_runtime": 1.0} for step, one in enumerate(values, 1)]
    tell(folder, said)
    state_file(folder).write_text(json.dumps({"global_step": len(values), "log_history": log}))
    return folder


def test_two_runs_share_charts_and_figures(tmp_path):
    first = run_with_log(tmp_path / "first", [3.0, 0.5, 1.0], student="small", objective="kl")
    second = run_with_log(tmp_path / "second", [4.0, 2.0], student="large", objective="kl")
    done = CliRunner().invoke(app, ["report", str(first), str(second)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(first / "comparison.html")), done.output
    made = (first / "comparison.html").read_text()
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", made) == [
        ("Loss, first: training", "3.000 → 1.000 (lowest 0.500, highest 3.000)"),
        ("Loss, first: eval", "1.500 → 0.500 (lowest 0.250, highest 1.500)"),
        ("Loss, second: training", "4.000 → 2.000 (lowest 2.000, highest 4.000)"),
        ("Loss, second: eval", "2.000 → 1.000 (lowest 1.000, highest 2.000)"),
        ("student", "first: small | second: large"),
    ]
    assert "<tr><th>3</th><td>1.000</td><td>0.500</td><td>–</td><td>–</td></tr>" in made
    for wrong, why in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no log yet")):
        failed = CliRunner().invoke(app, ["report", str(first), str(wrong)])
        assert (failed.exit_code, f"{wrong}: {why}" in failed.output) == (2, True), failed.output
    assert not (first / "report.html").exists()


# ---- In a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-quic"])
        yield started
        started.close()


@pytest.fixture
def address(tmp_path):
    for one in RECORDED:
        append(tmp_path, one)
    return write(tmp_path, LOG).as_uri()


def test_page_works_with_mouse_keyboard_phone_and_printer(browser, address, tmp_path):
    asked, wrong = [], []
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    view.on("request", lambda request: asked.append(request.url))
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    view.goto(address)
    assert [one for one in asked if not one.startswith("data:")] == [address]
    assert view.title() == f"{tmp_path.name}: on-policy distillation"
    drawn = view.locator("figure img").evaluate_all("all => all.map(one => one.naturalWidth)")
    assert len(drawn) == len(charts(LOG))
    assert min(drawn) > 100

    panel = view.locator("#detail")
    assert panel.is_hidden()
    tokens = view.locator(".tokens").nth(0).locator("[role=option]")
    colours = tokens.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == 3
    assert colours[0] == colours[4] != colours[1] != colours[2] == colours[3], (
        "none, half, full; outside of the loss none"
    )
    tokens.nth(1).hover()
    assert "␣is" in panel.inner_text()
    assert "0.500 nats" in panel.inner_text()
    assert "student 25.0 %, teacher 50.0 %" in panel.inner_text()
    assert re.search(r"é\s+75.0 %", panel.inner_text())

    view.locator("header").hover()
    for _ in range(40):  # past the tables' summaries, to the first completion
        view.keyboard.press("Tab")
        if view.evaluate("document.activeElement.getAttribute('role')") == "option":
            break
    said = []
    for key in ("ArrowRight", "ArrowRight", "End", "Home", "ArrowLeft"):
        view.keyboard.press(key)
        said.append(panel.locator("code").first.inner_text())
        assert view.locator("[aria-selected=true]").count() == 1
    assert said == ["␣is", "↵", "␣tool", "4", "4"]
    view.keyboard.press("Tab")  # one stop for each completion
    assert view.evaluate("document.activeElement.textContent") == "5"
    view.keyboard.press("Escape")
    assert panel.is_hidden()

    for width in (390, 320):
        view.set_viewport_size({"width": width, "height": 800})
        assert view.evaluate("document.documentElement.scrollWidth") <= width
    tokens.nth(0).click()
    assert panel.is_visible()
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        text, ground = (
            view.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        assert contrast(text, ground) > 7
        full = view.locator(".tokens [style*='--d:1']").first
        colour = full.evaluate(SHOWN)
        assert contrast(text, colour) > 4.5, (scheme, colour)
    view.emulate_media(media="print")
    assert panel.is_hidden()
    assert len(view.pdf()) > 10_000
    assert not wrong


def test_a_conversation_is_read_turn_by_turn(browser, tmp_path):
    append(tmp_path, Recorded(0, "eval", (replace(sample("a", "b", "c"), answers=((2, HOSTILE + " word" * 200),)),)))
    view = browser.new_page(viewport={"width": 320, "height": 800})
    view.goto(write(tmp_path, []).as_uri())
    assert view.title() == f"{tmp_path.name}: on-policy distillation"
    assert view.evaluate("document.documentElement.scrollWidth") <= 320
    answer = view.locator(".tool pre")
    assert answer.inner_text() == HOSTILE + " word" * 200
    said = []
    for key in ("Tab", "ArrowRight", "ArrowRight", "Tab", "ArrowLeft", "End"):
        view.keyboard.press(key)
        said.append(view.evaluate("document.activeElement.textContent"))
    assert said == ["a", "b", "b", "c", "c", " tool"], "arrows stay in a turn, Tab goes to the next"
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        block = view.locator(".tool").evaluate(SHOWN)
        assert block != view.evaluate("getComputedStyle(document.body).backgroundColor").replace(" ", "")
        for text in ("pre", "h5"):
            colour = view.locator(f".tool {text}").evaluate("one => getComputedStyle(one).color")
            assert contrast(colour, block) > 4.5, (scheme, text)


SHOWN = """one => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = getComputedStyle(one).backgroundColor;
    canvas.fillRect(0, 0, 1, 1);
    return "rgb(" + [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).join(",") + ")";
}"""
"""The colour behind an element, in the form of old."""


def contrast(*colours: str) -> float:
    """The contrast of two colours by WCAG 2, from 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(one) / 255 for one in re.findall(r"\d+", colour)[:3]]
        linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)
