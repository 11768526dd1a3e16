"""The page of a plan: it shows all of it, runs nothing, loads nothing, and stays small on large machines."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshloom.cli import main
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.observe.markup import el, void
from meshloom.observe.plan_page import Planned, plan_page
from meshloom.plan.report import value_text
from meshloom.plan.schedule import Schedule, schedule
from tests.test_plan_outlook import DATA, EIGHT, folder, plan, public

SPLIT = ("placement.actor=[0, 1, 2, 3]", "placement.rollout=[4, 5, 6, 7]")
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


class _Reader(HTMLParser):
    """Text and elements of a page; fails where elements are not closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.open else ""


def settings_of(path: Path, *given: str) -> TrainSettings:
    return load_settings(TrainSettings, None, [*DATA, f"model.path={path}", *given])


def page_of(path: Path, *given: str) -> str:
    return plan_page(Planned(plan=plan(path, *given), settings=settings_of(path, *given)))


def test_every_line_stands_with_its_formula_and_source(tmp_path: Path) -> None:
    path, given = public(tmp_path, "Qwen2.5-7B"), (EIGHT, *SPLIT, "cluster.device=h200", "parallel.rollout.tensor=2")
    read = _Reader(page_of(path, *given))
    for line in plan(path, *given).lines:
        for text in (line.name, line.formula, value_text(line)):
            assert text in read.text, line
    assert "override parallel.rollout.tensor=2" in read.text
    for text in ("each of 4 devices: 0-3", "peak", "left", "waits", "a step takes about", "dp 2 × tp 2"):
        assert text in read.text


def test_what_is_wrong_stands_first_with_the_changes_that_were_tried(tmp_path: Path) -> None:
    path, given = public(tmp_path, "Qwen2.5-7B"), (EIGHT, "parallel.rollout.tensor=3", "cluster.device=h200")
    found = plan(path, *given)
    text = _Reader(page_of(path, *given)).text
    assert f"cannot run: {len(found.problems)} problems" in text
    assert found.problems
    for problem in found.problems:
        assert problem.code in text and problem.what in text
        assert all(" ".join(change) in text for change in problem.suggestions)
    assert text.index("Problems") < text.index(found.problems[0].what) < text.index("prompts per step")


def test_it_runs_and_loads_nothing_and_what_a_user_wrote_is_text(tmp_path: Path) -> None:
    hostile = "</title><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'@@style@@"
    names = json.dumps([f"<b>{hostile}</b>"])
    path = folder(tmp_path / "m", TINY, 100)
    given = (f"run_dir={json.dumps(hostile)}", f"cluster.node_names={names}", f"reward.function={json.dumps(hostile)}")
    page = page_of(path, *given)
    read = _Reader(page)
    assert hostile in read.text
    assert {tag for tag, _ in read.found}.isdisjoint({"script", "img", "iframe", "object", "form"})
    for tag, attributes in read.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        links = [attributes[name] for name in ("href", "src") if name in attributes]
        assert all(link in ("data:,", "#main") or re.fullmatch(r"#[a-z]+", link or "") for link in links)
    assert "default-src 'none'" in page and "url(" not in page and "@import" not in page


def test_eight_thousand_devices_are_drawn_once_and_soon(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    nodes = ("cluster.nodes=1024", EIGHT, "cluster.device=h200", "batch.prompts_per_step=8192")
    split = ('placement.actor=["node[1-500]:all", "node501:0-3"]', 'placement.rollout=["node[502-1024]:all"]')
    started = time.process_time()
    page = page_of(path, *nodes, *split)
    assert time.process_time() - started < 20
    read = _Reader(page)
    assert len(page) < 200_000
    drawn = [attributes for _, attributes in read.found if (attributes.get("class") or "").startswith("device")]
    assert len([one for one in drawn if one["class"] in ("device", "device empty")]) == 3 * 8
    assert "500 nodes alike" in read.text and "523 nodes alike" in read.text and "4 devices" in read.text


def _bars(page: str) -> list[tuple[float, str]]:
    """For each bar: the sum of its pieces in percent of the scale, and the bytes that stand beside it."""
    rows = re.findall(r'<div class="bar-row"><span class="bar-name.*?</span>(<svg.*?</svg>)<span.*?<b>(.*?)</b>', page)
    widths = [re.findall(r'class="bytes-[a-z]+" x="[\d.]+%" y="2" width="([\d.]+)%"', row) for row, _ in rows]
    return [(sum(map(float, each)), text) for each, (_, text) in zip(widths, rows, strict=True) if each]


def test_bars_are_as_long_as_the_ledgers_sums(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    for given in ((EIGHT, "cluster.device=h200"), ("device_memory_bytes=200000000000", "device=cuda"), ("device=cpu",)):
        found = plan(path, *given)
        names = ("held in", "peak while")
        sums = [line for line in found.lines if line.name.startswith(names) and line.section.startswith("memory")]
        bars = _bars(page_of(path, *given))
        assert len(bars) == len(sums) > 1
        share = bars[0][0] / int(sums[0].value or 0)
        for (width, text), line in zip(bars, sums, strict=True):
            assert width / int(line.value or 0) == pytest.approx(share, rel=2e-3)
            assert text == f"{int(line.value or 0) / 2**30:.1f} GiB"


def test_a_cache_that_takes_what_is_left_is_not_said_to_be_too_much(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-1.5B")
    given = ("device=cuda", f"device_memory_bytes={60 * 2**30}", "model.gradient_checkpointing=true")
    assert "too much" not in page_of(path, *given, "rollout.max_response_tokens=8000")
    assert "too much" in page_of(path, *given, f"rollout.kv_cache_bytes={10**11}", "rollout.max_response_tokens=8000")


def step(path: Path, *given: str) -> tuple[Schedule, float]:
    found = plan(path, EIGHT, "cluster.device=h200", *given)
    assert found.outlook is not None and found.outlook.forecast is not None and found.layout is not None
    forecast = found.outlook.forecast
    return schedule(settings_of(path, EIGHT, *given), found.layout, forecast), forecast.step_s


def test_the_schedule_ends_with_the_step_and_nobody_is_twice_at_work(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    kl = ("algorithm.kl=loss", "algorithm.kl_coefficient=0.1")
    for given in (
        (),
        SPLIT,
        kl,
        (*SPLIT, *kl),
        ("offload.actor.optimizer=host",),
        (*SPLIT, "algorithm.max_lag_versions=1"),
    ):
        found, seconds = step(path, *given)
        assert found.end == pytest.approx(seconds, abs=0.2) and found.end <= seconds
        for role in {span.role for span in found.spans}:
            mine = found.of(role)
            assert all(one.stop <= other.start + 1e-9 for one, other in zip(mine, mine[1:], strict=False))
            waits = sum(wait.stop - wait.start for wait in found.waits(role))
            assert waits + sum(span.seconds for span in mine) == pytest.approx(found.end)


def test_with_a_lag_the_rollout_generates_while_the_actor_trains(tmp_path: Path) -> None:
    path = public(tmp_path, "Qwen2.5-7B")
    found, _ = step(path, *SPLIT)
    assert not found.lagged
    assert found.waits("actor")[0].on == ("rollout: generate",)
    lagged, _ = step(path, *SPLIT, "algorithm.max_lag_versions=1")
    assert lagged.lagged
    assert lagged.of("actor")[0].start == lagged.of("rollout")[0].start == 0
    assert lagged.end < found.end + lagged.of("actor")[0].seconds


def test_the_command_writes_the_page_beside_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "m", TINY, 100)
    given = [*DATA, "model.path=m", "--prompts", "100"]
    assert main(["plan", *given, "--html", "[page].html"]) == 0
    assert "The page: [page].html" in capsys.readouterr().out
    assert "can run" in Path("[page].html").read_text("utf-8")
    assert main(["plan", *given, "batch.prompts_per_update=3", "--html", "page.html", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"]
    assert "cannot run: 1 problem" in Path("page.html").read_text("utf-8")
    assert main(["plan", *given, "--html", "nowhere/page.html"]) == 2
    assert "nowhere/page.html cannot be written" in capsys.readouterr().err


def test_the_page_of_a_verl_command_accounts_for_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "m", TINY, 100)
    command = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=m",
        "data.train_batch_size=60",
        "foo.bar=3",
    ]
    assert main(["plan", "--verl", "--html", "v.html", "--", *command]) == 2
    text = _Reader(Path("v.html").read_text("utf-8")).text
    assert "verl has no such key" in text and "data.train_batch_size" in text and "batch.prompts_per_step" in text


def test_the_page_of_a_search_has_its_ranking_and_the_plan_of_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = public(tmp_path, "Qwen2.5-1.5B")
    hardware = ("--devices-per-node", "2", "--device-kind", "h100", "--prompts", "1000")
    assert (
        main(["plan", "--auto", *DATA, "batch.steps=4", f"model.path={path}", *hardware, "--json", "--html", "p.html"])
        == 0
    )
    ranking = json.loads(capsys.readouterr().out)["auto"]
    text = _Reader(Path("p.html").read_text("utf-8")).text
    assert len(ranking["ranking"]) > 1
    for one in ranking["ranking"]:
        assert one["arrangement"] in text and one["reason"] in text and one["budget"] in text
    assert " ".join(ranking["chosen"]) in text and text.index("Placements") < text.index("prompts per step")


def test_markup_escapes_what_is_not_markup() -> None:
    inside = el("p", "<i>", el("b", 3), None, ["&", el("br")], title='"<', class_="a", data_x=True, hidden=False)
    assert inside == '<p title="&quot;&lt;" class="a" data-x>&lt;i&gt;<b>3</b>&amp;<br></br></p>'
    assert void("line", stroke_width=2) == '<line stroke-width="2"/>'
