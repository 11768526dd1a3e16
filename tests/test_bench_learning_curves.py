"""The picture of learning curves, from the records of a run."""

import json
from pathlib import Path
from xml.etree import ElementTree

from bench.learning_curves import Curve, drawn

ACCURACY, REWARD = {0: 0.4, 2: 0.9}, {1: 0.5, 2: 1.25}


def test_a_curve_is_read_from_a_runs_records_and_drawn_inside_the_picture(tmp_path: Path) -> None:
    records = [{"step": step, "kind": "validation", "metrics": {"accuracy": value}} for step, value in ACCURACY.items()]
    records += [{"step": step, "kind": "train", "metrics": {"reward_mean": value}} for step, value in REWARD.items()]
    records.append({"step": 3, "kind": "train", "metrics": {}})
    lines = [json.dumps({**record, "phases": {}, "time": 0.0}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curve = Curve.of(tmp_path)
    assert curve == Curve(accuracy=ACCURACY, reward=REWARD)
    root = ElementTree.fromstring(drawn({"dapo": curve, "gspo": curve}))
    lines_drawn = [node.attrib["points"] for node in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines_drawn) == 4
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for points in lines_drawn:
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width and 0 <= y <= height
    assert {"dapo", "gspo"} <= {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
