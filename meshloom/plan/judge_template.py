"""The template of the question to a judge.

Owns: the default, and which text a run uses. Refuses to know: samples.
"""

from pathlib import Path

from meshloom.config.reward_settings import JudgeSettings

JUDGE_FIELDS = frozenset({"question", "prompt", "response", "answer", "extra", "data_source"})
"""What a template may use."""
DEFAULT_TEMPLATE = """\
You are a strict grader. Judge how well the response answers the question.

Question:
{{ question }}
{% if answer %}
Reference answer:
{{ answer }}
{% endif %}
Response:
{{ response }}

Explain your judgement in a few sentences. Then end with one line of the form
Score: N
where N is a whole number from 0 (useless or wrong) to 10 (correct, complete and clear)."""


def judge_template(judge: JudgeSettings) -> str:
    """Text of a judge's template.

    Raises:
        OSError: if its file cannot be read.
        UnicodeDecodeError: if its file is no UTF-8 text.
    """
    if judge.prompt_file is not None:
        return Path(judge.prompt_file).read_text(encoding="utf-8")
    return DEFAULT_TEMPLATE if judge.prompt is None else judge.prompt
