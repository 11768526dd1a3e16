"""How many prompts a source has, without reading them.

Owns: counting rows of files by what the format says. Refuses to know: columns, templates, tokens. Always holds: what cannot be
counted is unknown, never guessed; reading the data says what is wrong with it.
"""

from pathlib import Path

from meshloom.config.settings import EvalSettings, SftSettings, SourceSettings, TrainSettings


def count_prompts(settings: TrainSettings | SftSettings | EvalSettings) -> int | None:
    """Rows that a run will read, before overlong prompts are dropped; none if that cannot be known beforehand."""
    source = settings.source if isinstance(settings, EvalSettings) else settings.data.train
    return None if source is None else count_rows(source)


def count_rows(source: SourceSettings) -> int | None:
    """Rows of a source, ``max_rows`` at most; none for datasets and for files that cannot be counted."""
    if source.reasoning_gym is not None:
        count: int | None = source.size
    elif source.episodes is not None:
        count = source.episodes
    elif source.files:
        counts = [_count_file(Path(name)) for name in source.files]
        count = None if None in counts else sum(filter(None, counts))
    else:
        count = None
    return count if count is None or source.max_rows is None else min(count, source.max_rows)


def _count_file(path: Path) -> int | None:
    if not path.is_file():
        return None
    if path.suffix.lower() == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_metadata(path).num_rows
        except (pyarrow.ArrowException, OSError):
            return None
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as lines:
            return sum(1 for line in lines if not line.isspace())
    return None
