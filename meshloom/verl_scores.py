"""What verl scores rows with when a command names no function: a scorer for each ``data_source``.

Owns: which of our verifiers does the same. Refuses to know: how a verifier works. Always holds: the rows decide, and only the
first row of each file is read; a source without a counterpart is refused with what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.data.files import read_file

_GSM8K_PATTERN = r"#### (-?[0-9.,]+)"
_CODE = {"codecontests", "apps", "codeforces", "taco"}
_MATH = {
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "math",
    "math_dapo_reasoning",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
}


@dataclass(frozen=True, kw_only=True)
class DefaultScore:
    """What the rows ask for.

    Args:
        sources: ``data_source`` of the first row of each file that could be read.
        function: one of our verifiers; none: there is none, or the rows bring their own.
        kwargs: its arguments.
        warning: what differs from verl's scorer.
        refusal: why the rows cannot be scored as in verl, and what to do; empty: they can.
        pictures: column of pictures in the rows; empty: there are none.
    """

    sources: tuple[str, ...] = ()
    function: str | None = None
    kwargs: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""
    refusal: str = ""
    pictures: str = ""


def default_score(
    files: Sequence[str], picture_columns: Sequence[str] = ("images", "videos", "audios")
) -> DefaultScore:
    """How verl would score the rows of these files, as far as they can be read.

    Args:
        files: Parquet or JSON Lines; those that are missing or broken are passed over, since the plan tells of them.
        picture_columns: columns that hold pictures, films or sounds, where there are any.
    """
    records = [record for name in files if (record := _first_record(Path(name))) is not None]
    sources = tuple(dict.fromkeys(str(record.get("data_source") or "") for record in records))
    seen = [column for record in records for column in picture_columns if _holds_something(record.get(column))]
    pictures = seen[0] if seen else ""
    if not sources or all(source.startswith("reasoning_gym/") for source in sources):
        return DefaultScore(sources=sources, pictures=pictures)
    if sources == ("openai/gsm8k",):
        text = "as verl's own scorer of openai/gsm8k, but 1,000 is not 1000"
        return DefaultScore(
            sources=sources, function="regex", kwargs={"pattern": _GSM8K_PATTERN}, warning=text, pictures=pictures
        )
    if _CODE & set(sources):
        what = (
            f"verl's scorer of {', '.join(sources)} runs programs that the model wrote; that is asked for by name here"
        )
        fix = "set reward.function=code reward.code.enabled=true in front of --, after reading docs/code-rewards.md"
        return DefaultScore(sources=sources, refusal=f"{what}; {fix}", pictures=pictures)
    unknown = [source for source in sources if not _is_math(source)]
    if unknown:
        what = f"verl's own scorer of {unknown[0] or 'rows without data_source'} is not here, if it has one"
        fix = "name a function: reward.custom_reward_function.path=file.py, or reward.function=… in front of --"
        return DefaultScore(sources=sources, refusal=f"{what}; {fix}", pictures=pictures)
    text = (
        "the verifier math_verify judges, which accepts more forms of an answer than verl's own scorers, with 0 and 1"
    )
    return DefaultScore(sources=sources, function="math_verify", warning=text, pictures=pictures)


def _is_math(source: str) -> bool:
    return source in _MATH or source.startswith("aime") or source == "openai/gsm8k"


def _holds_something(value: Any) -> bool:
    return value is not None and len(value) > 0


def _first_record(file: Path) -> Mapping[str, Any] | None:
    if not file.is_file() or file.suffix.lower() not in (".parquet", ".jsonl"):
        return None
    try:
        first = next(read_file(file), None)
    except UserError:
        return None
    return None if first is None else first[1]
