"""Where rows come from: files, Hugging Face datasets, reasoning-gym.

Owns: reading a source into rows. Refuses to know: tokenizers, devices, models. Always holds: a row keeps its number in the
source; what cannot be read is an error that names the file and the row; nothing that is read can run code (pickles are
refused).
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.settings import SOURCE_KINDS, DataSettings, SourceSettings
from meshloom.data.columns import Place, to_row
from meshloom.data.files import read_file
from meshloom.data.rows import Row
from meshloom.data.tasks import generate


def load_rows(source: SourceSettings, data: DataSettings) -> list[Row]:
    """All rows of a source, in its order.

    With ``SftDataSettings`` each row must carry a worked response.

    Args:
        source: exactly one of its kinds; at most ``max_rows`` rows are read.
        data: names of columns.

    Raises:
        UserError: if the source cannot be read, is empty, or a row is not of a known form.
    """
    given = [name for name in SOURCE_KINDS if getattr(source, name)]
    if len(given) != 1:
        raise UserError(
            "a data source needs exactly one of files, dataset, reasoning_gym and episodes",
            where="data",
            why=f"both {' and '.join(given)} are given" if given else "none is given",
            fix="set one of them, such as data.train.files=[problems.jsonl]",
        )
    if source.reasoning_gym:
        rows = generate(source, data)
    elif source.episodes is not None:
        numbers = range(source.seed, source.seed + min(source.episodes, source.max_rows or source.episodes))
        rows = [Row(index=i, prompt="", data_source="episodes", extra={"number": n}) for i, n in enumerate(numbers)]
    else:
        records = _file_records(source) if source.files else _dataset_records(source)
        rows = [
            to_row(record, index, place, data) for index, (place, record) in enumerate(islice(records, source.max_rows))
        ]
    if not rows:
        raise UserError("the data source has no rows", where=_name(source), fix="point it at a source that has some")
    return rows


def _name(source: SourceSettings) -> str:
    subset = "" if source.subset is None else f"subset {source.subset}, "
    return ", ".join(source.files) or f"{source.dataset} ({subset}split {source.split})"


def _file_records(source: SourceSettings) -> Iterator[tuple[Place, dict[str, Any]]]:
    for name in source.files:
        count = 0
        for place, record in read_file(Path(name)):
            count += 1
            yield place, record
        if not count:
            raise UserError("the data file has no rows", where=name, fix="fill it, or take it out of files")


def _dataset_records(source: SourceSettings) -> Iterator[tuple[Place, dict[str, Any]]]:
    for index, record in enumerate(_load_dataset(str(source.dataset), source.subset, source.split)):
        yield Place(_name(source), "row", index), record


def _load_dataset(name: str, subset: str | None, split: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "a Hugging Face dataset needs the package datasets",
            where=f"dataset: {name}",
            fix="pip install datasets",
        ) from error
    folder = Path(name)
    try:
        if subset is not None and any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            raise ValueError("a dataset that save_to_disk has written has no subsets")
        if (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            if split not in loaded:
                raise ValueError(f'unknown split "{split}", there are {list(loaded)}')
            return loaded[split]
        if (folder / "state.json").is_file():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            "the dataset cannot be loaded",
            where=f"dataset: {name}, subset: {subset or 'none given'}, split: {split}",
            why=f"{type(error).__name__}: {error}"[:1000],
            fix="give a name on the Hub, or a folder with Parquet or JSON Lines files, and one of its subsets and splits",
        ) from error
