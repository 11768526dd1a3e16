"""The report: complete in itself, bounded, and safe whatever a model wrote."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.settings import TrainSettings
from meshloom.observe import report
from meshloom.observe.history import read_stages
from meshloom.observe.report import page_data, script_safe, write_report
from meshloom.observe.run_folder import RunFolder, RunState
from meshloom.observe.sample_choice import choose_samples

IMAGE = "<img src=x onerror=\"document.title='taken'\">"
HOSTILE = f"</script><script>document.title='taken'</script>{IMAGE}<!-- \u2028 @@data@@ & \ud800"


def sample(step: int, group: int, index: int = 0, **changed: object) -> dict:
    base = {"step": step, "kind": "train", "row": group, "group": group, "answer": "it", "data_source": "demo"}
    base |= {
        "prompt": f"what is {group}?",
        "response": f"it is {index}",
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
    }
    base |= {"reward": float(index % 2), "invalid": None, "advantage": 0.5, "finish": "stop", "versions": [step, step]}
    base |= {"parts": {"format": 1.0}}
    return base | changed


def record(step: int, kind: str = "train", **metrics: float) -> dict:
    given = metrics or {"reward_mean": step / 10, "reward_std": 0.2, "entropy": float("nan"), "own/number": 1.0}
    return {
        "step": step,
        "kind": kind,
        "metrics": given,
        "phases": {"generate": 1.0, "update": 2.0},
        "time": 1.7e9 + step,
    }


def make_run(path: Path, *, steps: int = 4, groups: int = 2) -> Path:
    given = {
        "run_dir": str(path),
        "model": {"path": "models/tiny"},
        "data": {"train": {"files": ["train.jsonl"]}},
        "batch": {"steps": steps},
    }
    with RunFolder.create(
        path, settings=TrainSettings.model_validate(given), plan_text="plan of <b>the</b> run"
    ) as run:
        run.log_metrics(record(0, "validation", accuracy=0.25, accuracy_low=0.2, accuracy_high=0.3))
        for step in range(1, steps + 1):
            run.log_metrics(record(step))
            run.log_samples([sample(step, group, i) for group in range(groups) for i in range(4)])
        failed = {"reward": None, "invalid": "deadline", "advantage": None}
        run.log_samples([sample(steps, 99, response=HOSTILE, printed=HOSTILE, **failed)])
        run.log_metrics(record(steps, "validation", accuracy=0.75, accuracy_low=0.7, accuracy_high=0.8))
        run.set_status(RunState.FINISHED, step=steps, steps=steps)
    return path


class Page(HTMLParser):
    """The page as a browser's parser cuts it: elements with their attributes, and each script's and style's text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, dict, str]] = []
        self.inside: tuple[str, dict] = ("", {})
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.inside = (tag, dict(attrs))
        self.elements.append(self.inside)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ("", {})

    def handle_data(self, data: str) -> None:
        self.texts.append((*self.inside, data))

    @property
    def data(self) -> dict:
        return json.loads("".join(text for _, attrs, text in self.texts if attrs.get("id") == "data"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    path = write_report(make_run(tmp_path_factory.mktemp("runs") / "first"))
    text = path.read_text("utf-8")
    return text, Page(text)


def test_the_page_loads_nothing(page):
    text, parsed = page
    assert not any("src" in attrs for _, attrs in parsed.elements)
    assert [attrs["href"] for tag, attrs in parsed.elements if tag == "link"] == ["data:,"]
    without_data = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"']*", without_data))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name space of SVG, which is a name"
    assert "url(" not in without_data and "@import" not in without_data


def test_the_policy_admits_the_pages_own_script_and_style_only(page):
    _, parsed = page
    policy = next(
        attrs["content"] for tag, attrs in parsed.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        content = "".join(text for name, attrs, text in parsed.texts if name == tag and "type" not in attrs)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_what_a_model_wrote_stays_data(page):
    _, parsed = page
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    assert not any(tag == "img" for tag, _ in parsed.elements)
    found = [(s["response"], s["printed"]) for s in parsed.data["samples"] if s["invalid"] == "deadline"]
    assert found == [(HOSTILE.replace("\ud800", "?"),) * 2]


def test_json_in_a_script_has_no_character_that_could_end_it():
    text = script_safe({"a": HOSTILE, "</script>": ["<!--", "&lt;"]})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": HOSTILE, "</script>": ["<!--", "&lt;"]}


def test_the_scripts_never_parse_a_string_as_markup():
    scripts = "".join(file.read_text("utf-8") for file in (Path(report.__file__).parent / "page").glob("*.js"))
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "fetch(",
        "XMLHttpRequest",
    ):
        assert name not in scripts


def test_the_page_is_told_result_settings_samples_and_time(page):
    data = page[1].data
    assert [(m["label"], m["accuracy"], m["low"]) for m in data["milestones"]] == [
        ("before", 0.25, 0.2),
        ("after", 0.75, 0.7),
    ]
    stage = data["stages"][0]
    assert (stage["state"], stage["step"], stage["steps"]) == ("finished", 4, 4)
    assert stage["facts"]["Model"] == "tiny" and stage["facts"]["Training data"] == "train.jsonl"
    assert stage["plan"] == "plan of <b>the</b> run" and "samples_per_prompt: 8" in stage["settings"]
    assert stage["phase_seconds"] == {"generate": 6.0, "update": 12.0}
    assert stage["kinds"]["train"]["metrics"]["entropy"] == [None] * 4
    assert stage["kinds"]["train"]["metrics"]["own/number"] == [1.0] * 4
    assert len(data["samples"]) == data["samples_total"] == 33
    assert [data["prompts"][s["prompt"]]["text"] for s in data["samples"][:5]] == ["what is 0?"] * 4 + ["what is 1?"]
    assert [s["solved"] for s in data["samples"][:2]] == [False, True]


def test_samples_are_bounded_in_number_with_whole_groups_and_both_ends(tmp_path):
    with RunFolder.create(tmp_path) as run:
        for step in range(1, 201):
            run.log_metrics(record(step))
            run.log_samples([sample(step, group, i) for group in range(8) for i in range(4)])
            if step in (1, 100, 200):
                run.log_samples([sample(step, i, kind="validation") for i in range(300)])
    chosen, total = choose_samples(read_stages(tmp_path), limit=500, byte_limit=10**9)
    assert total == 200 * 32 + 900
    assert 450 <= len(chosen) <= 500
    train = [s for s in chosen if s["kind"] == "train"]
    steps = sorted({s["step"] for s in train})
    assert steps[0] == 1 and steps[-1] == 200 and len(steps) == 60
    assert {s["step"] for s in chosen if s["kind"] == "validation"} == {1, 100, 200}
    groups = {(s["step"], s["group"]) for s in train}
    assert len(train) == 4 * len(groups)


def test_samples_are_bounded_in_bytes(tmp_path):
    with RunFolder.create(tmp_path) as run:
        for step in range(1, 21):
            run.log_metrics(record(step))
            run.log_samples([sample(step, group, response="x" * 10_000) for group in range(8)])
    chosen, total = choose_samples(read_stages(tmp_path), limit=2000, byte_limit=500_000)
    assert total == 160 and 30 <= len(chosen) <= 50
    assert sum(len(json.dumps(s)) for s in chosen) <= 520_000
    assert {1, 20} <= {s["step"] for s in chosen}


def test_metrics_are_thinned_evenly_and_say_so(tmp_path):
    with RunFolder.create(tmp_path) as run:
        for step in range(1, 12_002):
            run.log_metrics(record(step, loss=float(step)))
    data = page_data(read_stages(tmp_path), "long")
    train = data["stages"][0]["kinds"]["train"]
    assert train["records"] == 12_001 and len(train["step"]) == report.MOST_POINTS
    assert train["step"][0] == 1 and train["step"][-1] == 12_001
    gaps = {b - a for a, b in zip(train["step"], train["step"][1:], strict=False)}
    assert gaps <= {2, 3}
    assert data["stages"][0]["phase_seconds"]["generate"] == 12_001.0


def test_stages_are_shown_in_order(tmp_path):
    make_run(tmp_path / "grpo")
    with RunFolder.create(tmp_path / "warm-up") as run:
        for step in range(1, 4):
            run.log_metrics(record(step, "sft", loss=1.0 / step) | {"time": 1.6e9 + step})
    (tmp_path / "notes").mkdir()
    for stages in (None, {"warm-up": tmp_path / "warm-up", "grpo": tmp_path / "grpo"}):
        data = Page(write_report(tmp_path, stages=stages, title="a <lesson>").read_text("utf-8")).data
        assert [stage["name"] for stage in data["stages"]] == ["warm-up", "grpo"]
        assert list(data["stages"][0]["kinds"]) == ["sft"]
        assert [m["label"] for m in data["milestones"]] == ["before", "after grpo"]
        assert {s["stage"] for s in data["samples"]} == {1}
        assert data["title"] == "a <lesson>"


def test_an_unfinished_run_with_a_half_last_line_has_a_report(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "run" / "status.json").unlink()
    for name in ("metrics.jsonl", "samples.jsonl"):
        file = tmp_path / "run" / name
        file.write_bytes(file.read_bytes()[:-20])
    data = Page(write_report(tmp_path / "run").read_text("utf-8")).data
    assert len(data["milestones"]) == 1 and data["samples_total"] == 32


def test_a_folder_without_metrics_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="nothing to show(?s:.*)no metrics.jsonl"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="nothing to show(?s:.*)no such folder(?s:.*)run_dir"):
        write_report(tmp_path / "typo")
    assert not list(tmp_path.iterdir())


def test_invalid_rewards_are_counted_for_the_top_of_the_page(tmp_path: Path) -> None:
    """They stood in a folded chart only."""
    with RunFolder.create(tmp_path / "run") as run:
        run.log_metrics(record(0, "validation", reward_invalid=2.0))
        run.log_metrics(record(1, reward_invalid=3.0, **{"reward_invalid/raised": 2.0, "reward_invalid/died": 1.0}))
        run.log_metrics(record(2, reward_invalid=4.0, **{"reward_invalid/raised": 4.0}))
        run.log_metrics(record(3, reward_invalid=0.0))
    (stage,) = page_data(read_stages(tmp_path / "run"), "run")["stages"]
    assert stage["invalid"] == {
        "validation": {"count": 2, "reasons": {}},
        "train": {"count": 7, "reasons": {"raised": 6, "died": 1}},
    }
    assert all(
        stage["invalid"] == {} for stage in page_data(read_stages(make_run(tmp_path / "good")), "good")["stages"]
    )
