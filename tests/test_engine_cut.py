"""Engines whose model is cut over ranks: the samples of one device, whatever the trainer's layout."""

from pathlib import Path

import pytest
import torch

from meshloom.config.errors import UserError
from meshloom.rollout.cut_model import cut_for_engine
from meshloom.train.load import load_model
from tests import cut_engine_checks
from tests.cut_engine_checks import Told
from tests.mesh_checks import CPU, Axes, folder_of
from tests.models import tiny_model
from tests.ranks import Ranks

Meshes = list[tuple[Axes, list[int]]]
KINDS = ["torch", "paged"]
ALL = [0, 1, 2, 3]


def assert_same(found: Told, expected: Told) -> None:
    assert found.keys() == expected.keys()
    for key, (ids, logprobs, finish) in expected.items():
        assert found[key][0] == ids and found[key][2] == finish, key
        torch.testing.assert_close(torch.tensor(found[key][1]), torch.tensor(logprobs), rtol=0, atol=1e-5)


def expected_of(folder: str) -> list[Told]:
    return [cut_engine_checks.generate(kind, load_model(folder, torch.float32, CPU)) for kind in KINDS]


@pytest.mark.parametrize(
    ("name", "family", "changes", "meshes", "tensor"),
    [
        ("untied, sharded", "qwen3", {}, [((("fsdp", 4),), ALL)], 2),
        ("tied, layers and shards cut", "llama", {"tie_word_embeddings": True}, [((("fsdp", 2), ("tp", 2)), ALL)], 2),
        pytest.param(
            *("fewer heads of keys than ranks", "qwen3", {}, [((("pp", 2), ("fsdp", 2)), ALL)], 4),
            marks=pytest.mark.slow,
        ),
        ("a vocabulary that does not divide", "llama", {"vocab_size": 97}, [((("fsdp", 2),), [0, 1])], 2),
    ],
)
def test_samples_are_those_of_one_device(
    four_ranks: Ranks, tmp_path: Path, name: str, family: str, changes: dict, meshes: Meshes, tensor: int
) -> None:
    """Both embedded engines, with a cache so small that samples are set back; all ranks draw the same."""
    folder = folder_of(tmp_path, family, **changes)
    found = four_ranks.run(cut_engine_checks.generate_cut, KINDS, meshes, folder, ALL, tensor)
    for expected, *of_ranks in zip(expected_of(folder), *found, strict=True):
        for one in of_ranks:
            assert one == of_ranks[0] or tensor == 2
            assert_same(one, expected)


def test_from_a_trainer_on_other_devices(four_ranks: Ranks, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3")
    for axes in ((("tp", 2),), (("pp", 2),), (("fsdp", 2),)):
        found = four_ranks.run(cut_engine_checks.generate_cut, KINDS[:1], [(axes, [0, 1])], folder, [2, 3], 2)
        assert found[:2] == [[{}]] * 2
        assert found[2] == found[3]
        assert_same(found[2][0], expected_of(folder)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_end_what_the_first_one_ends(four_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """The others' clocks and aborts do not count: else they would wait for ranks that have left."""
    found = four_ranks.run(cut_engine_checks.end_at_once, kind, folder_of(tmp_path, "qwen3"))
    late, aborted = found[0]
    assert {finish for _, _, finish in late.values()} == {"deadline"}
    assert "aborted" in {finish for (request, _), (_, _, finish) in aborted.items() if request == 2}
    assert {finish for (request, _), (_, _, finish) in aborted.items() if request != 2} <= {"stop", "length"}
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_come_later_come_to_all_ranks_at_once(four_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """What one rank has had already waits for the others."""
    found = four_ranks.run(cut_engine_checks.join_at_once, kind, folder_of(tmp_path, "qwen3"))
    joined, alone = found[0]
    assert {request for request, _ in joined} >= {0, 2, 3, 4, 9}
    assert_same(joined, alone)
    assert found[1] == found[0] and found[3] == found[2]


def test_a_rank_that_draws_other_tokens_says_so(four_ranks: Ranks) -> None:
    said = four_ranks.run(cut_engine_checks.draw_apart)
    assert "device 2 of an engine has drawn other tokens than the first one" in said[2]
    assert said[:2] == ["", ""] and said[3] == ""


class _Two:
    count, rank, part = 2, 0, None

    def cut_vocabulary(self, rows: int) -> None:
        raise AssertionError(rows)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="4 heads, 1 of keys and values, do not go into 3 devices"):
        three = _Two()
        three.count = 3
        cut_for_engine(tiny_model("qwen3", num_key_value_heads=1), three)
    with pytest.raises(UserError, match="is not divisible by tp 2"):
        cut_for_engine(tiny_model("qwen3", intermediate_size=95), _Two())
