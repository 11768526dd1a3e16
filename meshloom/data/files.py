"""Reading Parquet and JSON Lines files, one record at a time.

Owns: file formats. Refuses to know: what the columns mean. Always holds: a file that cannot be read is an error that names
it, with the line where there are lines; a format that can run code when it is read is refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.data.columns import Place

_PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".npy", ".npz", ".joblib"}


def read_file(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield each record of a Parquet or JSON Lines file with its place.

    Raises:
        UserError: if the file is missing, empty, corrupt or of another format.
    """
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise UserError(
            f"{suffix} files are not read",
            where=str(path),
            why="loading one can run any code that was put into it",
            fix="save the rows as Parquet (.parquet) or JSON Lines (.jsonl)",
        )
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if suffix not in readers:
        raise UserError(
            f"unknown kind of data file: {suffix or 'no extension'}",
            where=str(path),
            fix="files end in .parquet or .jsonl (JSON Lines: one object a line)",
        )
    if not path.is_file():
        raise UserError(
            "the data file does not exist" if not path.exists() else "the data file is not a file",
            where=str(path),
            fix=_like(path) or f"paths are relative to {Path.cwd()}",
        )
    if not path.stat().st_size:
        raise UserError("the data file is empty", where=str(path), fix="fill it, or take it out of files")
    return readers[suffix](path)


def _like(path: Path) -> str:
    """Data files that stand where the missing one was looked for."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either; paths are relative to {Path.cwd()}"
    names = sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in (".parquet", ".jsonl"))
    return f"in {path.parent.resolve()} there are: {', '.join(names[:10])}" if names else ""


def _read_parquet(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        index = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    yield Place(str(path), "row", index), record
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            "the Parquet file cannot be read",
            where=str(path),
            why=str(error)[:500],
            fix="write it again; it may be incomplete",
        ) from error


def _read_jsonl(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = Place(str(path), "line", number)
                    yield place, _parse_line(line, place)
    except OSError as error:
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error


def _parse_line(line: bytes, place: Place) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(
            "the line is not JSON",
            where=str(place),
            why=str(error),
            fix="JSON Lines holds one JSON object on each line",
        ) from error
    if not isinstance(record, dict):
        raise UserError(
            f"the line holds a JSON {type(record).__name__}, not an object",
            where=str(place),
            fix='each line is an object such as {"prompt": "…", "answer": "…"}',
        )
    return record
