"""Files that are written in parts: ordinary safetensors files, whatever the cut."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from meshloom.train.shared_files import Part, SharedFile, Spec, create

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


def boxes(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Part]:
    """All boxes of a tensor cut so many times on each axis."""
    if not shape:
        return [Part((), ())]
    edges = [shape[0] * i // cuts[0] for i in range(cuts[0] + 1)]
    inner = boxes(shape[1:], cuts[1:])
    return [
        Part((a, *box.offsets), (b - a, *box.shape)) for a, b in zip(edges, edges[1:], strict=False) for box in inner
    ]


def cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.shape, strict=True))]


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=40)
def test_parts_in_any_order_make_the_whole_and_are_read_in_others(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], written: tuple, read: tuple, random
) -> None:
    file = tmp_path_factory.mktemp("parts") / "all.safetensors"
    whole = {
        f"t{i}": torch.randn(shape).mul(3).to(DTYPES[(i + random.randrange(5)) % 5]) for i, shape in enumerate(shapes)
    }
    create(file, {name: Spec(tuple(t.shape), t.dtype) for name, t in whole.items()})
    parts = [(name, part) for name, t in whole.items() for part in boxes(tuple(t.shape), written)]
    random.shuffle(parts)
    with SharedFile(file, write=True) as one, SharedFile(file, write=True) as other:
        for number, (name, part) in enumerate(parts):
            (one, other)[number % 2].write(name, part, cut(whole[name], part))
    loaded = load_file(file)
    assert loaded.keys() == whole.keys()
    with SharedFile(file) as opened:
        for name, tensor in whole.items():
            assert torch.equal(loaded[name], tensor)
            assert torch.equal(opened.read(name), tensor)
            for part in boxes(tuple(tensor.shape), read):
                assert torch.equal(opened.read(name, part), cut(tensor, part))


def test_files_of_others_are_read_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(7)}
    save_file(tensors, tmp_path / "given.safetensors")
    with SharedFile(tmp_path / "given.safetensors") as opened:
        assert torch.equal(opened.read("a", Part((1, 1), (2, 2))), tensors["a"][1:3, 1:3])
        assert torch.equal(opened.read("b"), tensors["b"])
        with pytest.raises(ValueError, match="is no part of a"):
            opened.read("a", Part((2, 0), (2, 4)))
    create(tmp_path / "made.safetensors", {"a": Spec((3, 4), torch.float32)})
    with SharedFile(tmp_path / "made.safetensors", write=True) as made, pytest.raises(ValueError, match="takes"):
        made.write("a", Part((0, 0), (1, 4)), torch.zeros(1, 4, dtype=torch.float64))
