"""Checkpoints survive kills, full disks and failing writers; retention goes by what is on disk."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshloom.config.errors import RunFault, UserError
from meshloom.train.checkpoint_store import (
    CheckpointStore,
    IncompleteCheckpoint,
    complete_checkpoints,
    latest_checkpoint,
    read_manifest,
    verify,
)

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from meshloom.train.checkpoint_store import CheckpointStore, latest_checkpoint, read_manifest, verify

folder, asynchronous = Path(sys.argv[1]), sys.argv[2] == "asynchronous"

def writer(step):
    def write(folder):
        for name in ("model", "optimizer"):
            save_file({"values": np.full(60_000, step)}, folder / f"{name}.safetensors")
        (folder / "state").mkdir()
        (folder / "state" / "order.json").write_text(str(step))
    return write

store = CheckpointStore(folder, keep_last=2, keep_best=1)
latest = store.latest()
step = 0 if latest is None else verify(latest).step
print("start", flush=True)
while True:
    step += 1
    store.save(step, writer(step), score=float(-step), asynchronous=asynchronous)
    if asynchronous:
        store.wait()
    print(step, flush=True)
    if step % 3 == 0:
        store.save(step, writer(step), score=float(-step), asynchronous=False)
"""


def writes(step: int, text: str = "") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({"values": np.full(100, step)}, folder / "model.safetensors")
        (folder / "inside").mkdir()
        (folder / "inside" / "note.txt").write_text(text or str(step))

    return write


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=1) as opened:
        yield opened


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_was_saved_is_found_and_verifies(store: CheckpointStore, asynchronous: bool) -> None:
    assert store.latest() is None
    store.save(10, writes(10), score=0.5, asynchronous=asynchronous)
    store.wait()
    latest = store.latest()
    assert latest == store.folder / "step-000010"
    manifest = verify(latest)
    assert (manifest.step, manifest.score) == (10, 0.5)
    assert set(manifest.files) == {"model.safetensors", "inside/note.txt"}
    assert load_file(latest / "model.safetensors")["values"][0] == 10
    assert names(store.folder) == ["step-000010"]


def test_the_newest_is_newest_by_number(store: CheckpointStore) -> None:
    for step in (999_999, 1_000_000):
        store.save(step, writes(step))
    assert store.latest() == store.folder / "step-1000000"


def test_the_last_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, None), (4, 0.3), (5, 0.9), (6, 0.2), (7, 0.2)):
        store.save(step, writes(step), score=score)
    assert names(store.folder) == ["step-000005", "step-000006", "step-000007"]


def test_retention_goes_by_what_is_on_disk_after_a_restart(tmp_path: Path) -> None:
    """A run killed between its last save and the pruning after it used to keep one too many when it was resumed."""
    with CheckpointStore(tmp_path, keep_last=9, keep_best=0) as generous:
        for step in range(1, 7):
            generous.save(step, writes(step), score=1.0 if step == 2 else 0.0)
    with CheckpointStore(tmp_path, keep_last=1, keep_best=1) as strict:
        assert names(tmp_path) == ["step-000002", "step-000006"]
        strict.save(7, writes(7))
    assert names(tmp_path) == ["step-000002", "step-000007"]


def test_damaged_checkpoints_do_not_count_when_old_ones_are_pruned(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=2, keep_best=0) as store:
        for step in (1, 2):
            store.save(step, writes(step))
        (tmp_path / "step-000002" / "model.safetensors").write_bytes(b"short")
        (tmp_path / "step-000009").mkdir()
        assert store.latest() == tmp_path / "step-000001"
        store.save(3, writes(3))
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001", "step-000003"]


def test_nothing_is_pruned_while_another_process_is_writing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from meshloom.train.checkpoint_store import CheckpointStore\n"
        "def write(folder): (folder / 'a').write_text('a'); print('writing', flush=True); sys.stdin.read()\n"
        f"CheckpointStore(Path({str(tmp_path)!r}), keep_last=1, keep_best=0).save(9, write)"
    )
    with CheckpointStore(tmp_path, keep_last=1, keep_best=0) as store:
        store.save(1, writes(1))
        other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"writing\n"
            store.save(2, writes(2))
            assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001", "step-000002"]
            CheckpointStore(tmp_path, keep_last=1, keep_best=0).close()
            assert any(name.startswith(".writing-step-000009") for name in names(tmp_path))
        finally:
            other.communicate()
    assert other.returncode == 0
    assert names(tmp_path) == ["step-000009"]


def test_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    """A process number says nothing: in a container the dead one had the same."""
    with CheckpointStore(tmp_path, keep_last=5, keep_best=0) as store:
        store.save(1, writes(1))
    (tmp_path / f".writing-step-000003-{os.getpid()}").mkdir()
    (tmp_path / f".writing-step-000003-{os.getpid()}" / "half").write_text("half")
    (tmp_path / f".removing-step-000000-2-{os.getpid()}").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000007").write_text("a file")
    with CheckpointStore(tmp_path, keep_last=5, keep_best=0) as store:
        assert names(tmp_path) == ["notes", "step-000001", "step-000007"]
        assert store.latest() == tmp_path / "step-000001"


def test_a_step_that_is_saved_again_replaces_the_first_once_it_is_complete(store: CheckpointStore) -> None:
    store.save(4, writes(4, "first"))
    first = store.folder / "step-000004"
    seen: list[Path | None] = []

    def write(folder: Path) -> None:
        writes(4, "second")(folder)
        seen.append(store.latest())

    store.save(4, write, score=0.5)
    assert seen == [first]
    latest = store.latest()
    assert latest is not None
    assert (latest / "inside" / "note.txt").read_text() == "second"
    assert verify(latest).score == 0.5
    assert names(store.folder) == [latest.name]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(store: CheckpointStore) -> None:
    store.save(4, writes(4))
    (store.folder / "step-000004" / "model.safetensors").unlink()
    store.save(4, writes(4))
    assert [verify(path).step for path in complete_checkpoints(store.folder)] == [4]
    assert len(names(store.folder)) == 1


def test_what_a_later_revision_replaces_does_not_count_as_one_of_the_last(store: CheckpointStore) -> None:
    """Killed before it could remove the first revision, the store does so after the next save."""
    store.save(1, writes(1))
    store.save(2, writes(2))
    shutil.copytree(store.folder / "step-000002", store.folder / "step-000002-2")
    assert store.latest() == store.folder / "step-000002-2"
    store.save(3, writes(3))
    assert names(store.folder) == ["step-000002-2", "step-000003"]


def fails(folder: Path) -> None:
    writes(5)(folder)
    raise RuntimeError("the writer broke")


def test_a_writer_that_fails_leaves_earlier_checkpoints_untouched(store: CheckpointStore) -> None:
    store.save(4, writes(4))
    with pytest.raises(RuntimeError, match="the writer broke"):
        store.save(5, fails)
    assert names(store.folder) == ["step-000004"]
    verify(store.folder / "step-000004")


@pytest.mark.parametrize("then", ["save", "wait", "close"])
def test_a_failure_in_the_background_is_raised_once_by_the_next_call(tmp_path: Path, then: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=0)
    store.save(4, writes(4))
    store.save(5, fails, asynchronous=True)
    with pytest.raises(RuntimeError, match="the writer broke"):
        store.save(6, writes(6)) if then == "save" else getattr(store, then)()
    store.close()
    assert names(tmp_path) == ["step-000004"]


def test_saving_in_the_background_does_not_wait_for_the_writer(store: CheckpointStore) -> None:
    may_write, inside = threading.Event(), threading.Event()

    def write(folder: Path) -> None:
        inside.set()
        assert may_write.wait(20)
        writes(1)(folder)

    store.save(1, write, asynchronous=True)
    assert inside.wait(20)
    assert store.latest() is None
    may_write.set()
    store.wait()
    assert store.latest() == store.folder / "step-000001"


def test_too_little_room_is_refused_before_anything_is_written(store: CheckpointStore) -> None:
    called = []
    with pytest.raises(RunFault) as caught:
        store.save(3, called.append, estimated_bytes=2**60)
    assert "no room for the checkpoint of step 3: it needs 1,048,576.00 TiB" in str(caught.value)
    assert called == []
    assert not store.folder.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, or the device that is always full where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True).returncode == 0
    )
    yield place
    if mounted:
        subprocess.run(["umount", place], check=True)


def fills_with_tensors(folder: Path) -> None:
    save_file({"values": np.zeros(2**18)}, folder / "large.safetensors")
    Path("/dev/full").write_bytes(b"x")


def fills_with_text(folder: Path) -> None:
    writes(2)(folder)
    (folder / "large.txt").write_bytes(bytes(2**21))
    Path("/dev/full").write_bytes(b"x")


def fills_with_a_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(2**16)}, unk_token="0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.save("/dev/full")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fills", [fills_with_tensors, fills_with_text, fills_with_a_tokenizer])
def test_a_full_disk_is_told_plainly_and_costs_no_earlier_checkpoint(
    small_disk: Path, fills: Callable[[Path], None], asynchronous: bool
) -> None:
    with CheckpointStore(small_disk, keep_last=1, keep_best=0) as store:
        store.save(1, writes(1))
        with pytest.raises(RunFault, match="the disk is full: the checkpoint of step 2"):
            store.save(2, fills, asynchronous=asynchronous)
            store.wait()
        assert names(small_disk) == ["step-000001"]
        verify(small_disk / "step-000001")
        store.save(3, writes(3))
        assert names(small_disk) == ["step-000003"]


def test_damage_is_found_by_size_at_once_and_by_content_on_load(store: CheckpointStore) -> None:
    store.save(1, writes(1))
    store.save(2, writes(2))
    newest = store.folder / "step-000002"
    weights = newest / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"\xff")
    assert store.latest() == newest
    with pytest.raises(IncompleteCheckpoint, match="model.safetensors is not what was written"):
        verify(newest)
    weights.write_bytes(whole[:-1])
    assert store.latest() == store.folder / "step-000001"
    with pytest.raises(IncompleteCheckpoint, match=f"has {len(whole) - 1} bytes, {len(whole)} were written"):
        verify(newest)
    weights.unlink()
    with pytest.raises(IncompleteCheckpoint, match="the checkpoint lacks model.safetensors"):
        verify(newest)
    weights.write_bytes(whole)
    verify(newest)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "step": 2, "score": null, "files": [3]}']
)
def test_a_damaged_manifest_is_no_checkpoint(store: CheckpointStore, content: str) -> None:
    store.save(2, writes(2))
    (store.folder / "step-000002" / "manifest.json").write_text(content)
    assert store.latest() is None
    with pytest.raises(IncompleteCheckpoint, match="manifest.json cannot be read"):
        read_manifest(store.folder / "step-000002")


def test_a_checkpoint_of_another_format_is_refused_not_passed_over(store: CheckpointStore) -> None:
    store.save(2, writes(2))
    manifest = store.folder / "step-000002" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    with pytest.raises(UserError, match="has format 2, this version reads format 1"):
        store.latest()


def test_pickles_are_neither_saved_nor_loaded(store: CheckpointStore) -> None:
    def write(folder: Path) -> None:
        writes(1)(folder)
        (folder / "state.pt").write_bytes(b"\x80\x02")

    with pytest.raises(UserError, match="state.pt is a pickle"):
        store.save(1, write)
    assert names(store.folder) == []
    store.save(2, writes(2))
    (store.folder / "step-000002" / "rng.pkl").write_bytes(b"\x80\x02")
    with pytest.raises(UserError, match="rng.pkl is a pickle"):
        verify(store.folder / "step-000002")


def test_what_a_checkpoint_cannot_hold_is_a_fault_of_the_program(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="something else"):
        store.save(1, lambda folder: (folder / "link").symlink_to("/etc/hostname"))
    with pytest.raises(ValueError, match="the store's own file"):
        store.save(1, lambda folder: (folder / "manifest.json").touch())
    with pytest.raises(ValueError, match="score of step 1 is nan"):
        store.save(1, writes(1), score=float("nan"))
    assert names(store.folder) == []


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_kill_at_any_moment_loses_no_finished_checkpoint(tmp_path: Path, mode: str) -> None:
    """Each life continues where the last one ended, and is killed at a random moment of its saving and pruning."""
    moments = random.Random(mode)
    reached = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "start\n", process.communicate()[1]
        time.sleep(moments.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        said, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        reached = max([reached, *map(int, said.split("\n")[: said.count("\n")])])
        with CheckpointStore(tmp_path, keep_last=2, keep_best=1) as store:
            latest = store.latest()
        if reached == 0 and latest is None:
            continue
        assert latest is not None
        manifest = verify(latest)
        assert manifest.step >= reached
        assert all(
            load_file(latest / f"{name}.safetensors")["values"][-1] == manifest.step for name in ("model", "optimizer")
        )
        assert (latest / "state" / "order.json").read_text() == str(manifest.step)
        assert all(name.startswith("step-") for name in names(tmp_path))
        assert 1 <= len(complete_checkpoints(tmp_path)) <= 5
        assert len(complete_checkpoints(tmp_path)) == len(names(tmp_path))
    assert reached > 0


def test_files_get_the_usual_mode(tmp_path: Path) -> None:
    """Weights used to be readable by their owner alone, so that a server under another user could not load an export."""

    def write(folder: Path) -> None:
        (folder / "plain.json").write_text("{}")
        save_file({"x": np.zeros(3, dtype=np.float32)}, folder / "model.safetensors")

    with CheckpointStore(tmp_path, keep_last=1, keep_best=0) as store:
        store.save(1, write)
    folder = latest_checkpoint(tmp_path)
    modes = {(folder / name).stat().st_mode for name in ("plain.json", "model.safetensors")}
    assert len(modes) == 1
