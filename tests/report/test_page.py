"""The page of a report: whole, harmless, and usable in a browser with a mouse, a keyboard, on a phone and on paper."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from trl_opsd.cli.main import app
from trl_opsd.report.page import charts, write
from trl_opsd.report.samples import Recorded, Sample, Token, append, recorded_in, tell

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror=alert(1)>"\' &amp; {{ 7 * 7 }}'
LOG = [
    {"step": 0, "eval_divergence/mean": 0.5, "eval_reward": 0.25, "eval_rewards/right/mean": 0.25, "eval_runtime": 1.0},
    *(
        {
            "step": step,
            "loss": 0.1,
            "divergence/mean": 1 / step,
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


@pytest.fixture
def made(tmp_path):
    """The text of a page with these records."""

    def make(recorded, log=(), name="run", **said):
        run = tmp_path / name
        tell(run, said)
        for one in recorded:
            append(run, one)
        return write(run, log=log).read_text()

    return make


def curves(chart):
    return {name: dict(column.dropna()) for name, column in chart.frame.items()}


@pytest.mark.quick
def test_curves_are_numbers_of_the_log():
    found = {one.title: one for one in charts(LOG)}
    assert list(found) == ["Divergence", "Reward", "Entropy", "Seconds of a step", "Learning rate"]
    of_training = {step: 1 / step for step in range(1, 101)}
    assert curves(found["Divergence"]) == {"eval": {0: 0.5}, "training": of_training}, "what is not finite is no point"
    assert list(curves(found["Reward"])) == ["eval", "right, eval"]
    assert list(curves(found["Seconds of a step"])) == ["generate, training"]


@pytest.mark.quick
def test_text_of_models_is_escaped(made):
    text = made(RECORDED, LOG, a=HOSTILE)
    assert text.count("<script") == 1
    assert "onerror=alert(1)>" not in text
    assert "<img src=x" not in text
    assert text.count("{{ 7 * 7 }}") == 4, "setting, prompt, token and a tool's answer"
    asks_for = re.findall(r'\b(?:src|href|srcset|action|data)="([^",]*)', text)
    assert {*asks_for} == {"data:image/svg+xml;base64"}
    assert not re.search(r"@import|url\(", text)


@pytest.mark.quick
def test_tool_answers_stand_between_turns_and_are_no_tokens(made):
    acting = replace(sample("a", "b", "c"), answers=((2, "\n<|im_start|>user\n7\n"),))
    text = made([Recorded(0, "eval", (sample("a", "b", "c"),)), Recorded(9, "eval", (acting,))])
    kinds = r'<h4>(.*?)</h4>|tabindex="-?\d".*?>(.*?)</span>|tool<pre.*?>\n(.*?)</pre>|(…)'
    assert ["".join(one) for one in re.findall(kinds, text.partition("<article")[2], flags=re.DOTALL)] == [
        *("step 0", "a", "b", "c", " tool", "…"),
        *("step 9, turn 1", "a", "b", "&lt;|im_start|&gt;user\n7", "step 9, turn 2", "c", " tool", "…"),
    ]


def test_recorded_samples_round_trip(tmp_path):
    for one in RECORDED:
        append(tmp_path, one)
    append(tmp_path, Recorded(7, "train", (Sample("x", "a", (Token("y", float("inf"), 0.1, 0.0),), False),)))
    found = recorded_in(tmp_path)
    assert [(one.step, one.split) for one in found] == [*((one.step, one.split) for one in RECORDED), (7, "train")]
    assert vars(found[0].samples[0].tokens[1]) == {
        **{"text": " is", "divergence": 0.5, "student": 0.25, "teacher": 0.5, "choices": [["é", 0.75], ["\n", 0.2]]},
        "author": None,
    }
    assert found[2].samples[0].answers == [[1, HOSTILE]]
    assert found[-1].samples[0].tokens[0].divergence is None
    file = tmp_path / "report" / "samples.jsonl"
    file.write_text(file.read_text()[:-9])  # the run was killed while it wrote
    assert len(recorded_in(tmp_path)) == 4


def test_report_command_accepts_any_folder_with_a_log(trained, tmp_path):
    def asked(*arguments):
        return CliRunner().invoke(app, ["report", *map(str, arguments)])

    run, elsewhere = tmp_path / "run", tmp_path / "one.html"
    trained(output_dir=str(run), max_steps=2, save_strategy="steps", save_steps=1)  # without `report`
    done = asked(run)
    assert (done.exit_code, done.stdout.strip()) == (0, str(run / "report.html"))
    text = (run / "report.html").read_text()
    assert "<figure>" in text
    assert 'class="tokens"' not in text
    assert asked(run / "checkpoint-1", "-o", elsewhere).exit_code == 0
    assert elsewhere.read_text().split("<figure>")[1] != text.split("<figure>")[1], "the log of that checkpoint"
    no_log, unwritable = (tmp_path,), (run / "checkpoint-1", "-o", tmp_path / "no" / "such" / "folder.html")
    for wrong in (no_log, (tmp_path / "nowhere",), unwritable):
        assert asked(*wrong).exit_code == 2


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
    return write(tmp_path, log=LOG).as_uri()


def test_page_works_with_mouse_keyboard_phone_and_printer(browser, address):
    asked, wrong = [], []
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    view.on("request", lambda request: asked.append(request.url))
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    view.goto(address)
    assert [one for one in asked if not one.startswith("data:")] == [address]
    drawn = view.locator("figure img").evaluate_all("all => all.map(one => one.naturalWidth)")
    assert len(drawn) == len([*charts(LOG)])
    assert min(drawn) > 100

    panel = view.locator("#detail")
    assert panel.is_hidden()
    tokens = view.locator(".tokens").nth(0).locator("span")
    colours = tokens.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == 3, "none, half, full; outside of the loss none"
    assert colours[0] == colours[4] != colours[1] != colours[2] == colours[3]
    tokens.nth(1).hover()
    for said in ("␣is", "0.500 nats", "student 25.0 %, teacher 50.0 %", "é"):
        assert said in panel.inner_text()

    view.locator("h1").hover()
    for _ in range(40):  # to the first completion
        view.keyboard.press("Tab")
        if view.evaluate("document.activeElement.dataset.v"):
            break
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        view.keyboard.press(key)
        said.append(panel.inner_text().split("  ")[0])
    assert said == ["␣is", "↵", "␣is", "4", "4"]
    view.keyboard.press("Tab")  # one stop for each completion
    assert view.evaluate("document.activeElement.textContent") == "5"
    view.keyboard.press("Escape")
    assert panel.is_hidden()

    view.set_viewport_size({"width": 320, "height": 800})
    assert view.evaluate("document.documentElement.scrollWidth") <= 320
    tokens.nth(0).click()
    assert panel.is_visible()
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        text = view.evaluate("getComputedStyle(document.body).color")
        full = view.locator(".tokens [style*='--d:1']").first.evaluate(SHOWN)
        assert contrast(text, full) > 4.5, (scheme, full)
    view.emulate_media(media="print")
    assert panel.is_hidden()
    assert len(view.pdf()) > 10_000
    assert not wrong


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
