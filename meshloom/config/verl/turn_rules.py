"""verl's keys of several turns and tools.

Owns: their meaning here. Always holds: what bounds a turn or reads a call is translated; classes of tools, which are code of
another interface, are refused unless tools are given in our own.
"""

from collections.abc import Sequence

from meshloom.config.verl.actor_rules import ROLLOUT
from meshloom.config.verl.sheet import Sheet

GROUP = f"{ROLLOUT}.multi_turn"
ENABLE = f"{GROUP}.enable"
TOOLS = f"{GROUP}.tool_config_path"
INTERACTION = f"{GROUP}.interaction_config_path"
FUNCTIONS = f"{GROUP}.function_tool_path"
OWN = ("environment.tools=", "environment.gym=", "environment.custom=")
"""Overrides of ours that bring what answers a turn."""
_FORMATS = ("hermes", "llama3_json")
_ANSWER_CHARACTERS = 256
"""verl's default bound of a tool's answer."""
_ADVICE = "write tools as functions and add environment.tools=[tools.py:function] to the command, or environment.gym"


def turn_rules(sheet: Sheet) -> None:
    """Everything under ``rollout.multi_turn``, and which loop answers a prompt."""
    loop = f"{ROLLOUT}.agent.default_agent_loop"
    is_on = sheet.flag(ENABLE)
    allowed = ("single_turn_agent", "tool_agent") if is_on else ("single_turn_agent",)
    if sheet.has(loop) and sheet.text(loop) not in allowed:
        sheet.refuse(loop, f"agent loops of your own are not run; set it to {' or '.join(allowed)}")
    sheet.ignore("the environment decides how a prompt is answered", loop)
    if is_on:
        _episodes(sheet)
    why = "the environment says it" if is_on else "a prompt is answered in one turn"
    sheet.ignore(why, *[key for key in sheet.open() if key.startswith(f"{GROUP}.")])


def _episodes(sheet: Sheet) -> None:
    assistant, user = f"{GROUP}.max_assistant_turns", f"{GROUP}.max_user_turns"
    bounds = {assistant: sheet.whole(assistant), user: sheet.whole(user)}
    turns = {key: value + (key == user) for key, value in bounds.items() if value is not None}
    if turns:
        deciding = min(turns, key=lambda key: turns[key])
        sheet.set("environment.max_turns", turns[deciding], deciding, *turns)
    length, side, parallel = (
        f"{GROUP}.{name}" for name in ("max_tool_response_length", "tool_response_truncate_side", "max_parallel_calls")
    )
    sheet.set("environment.max_answer_characters", sheet.whole(length, _ANSWER_CHARACTERS), length)
    if sheet.text(side, "middle") != "right" and sheet.has(side):
        sheet.warn(side, "a tool's answer that is too long is cut at its end, and says so")
    if sheet.has(parallel):
        sheet.warn(parallel, "all calls of a turn are carried out, one after the other")
    form = f"{GROUP}.format"
    name = sheet.text(form, _FORMATS[0])
    if name in _FORMATS:
        sheet.set("environment.tool_format", name, form)
    else:
        advice = f"set {form}=hermes, or llama3_json, or leave it out and add environment.tool_format=regex"
        sheet.refuse(form, f"calls in the form {name!r} are not read; {advice}")
    classes = [key for key in (TOOLS, INTERACTION, FUNCTIONS) if sheet.has(key)]
    for key in classes:
        what = (
            "functions are not found by verl's own key" if key == FUNCTIONS else "classes written for verl are not run"
        )
        sheet.refuse(key, f"{what}; {_ADVICE}")
    callback, repeats = f"{GROUP}.completion_callback", f"{GROUP}.num_repeat_rollouts"
    if sheet.has(callback):
        sheet.refuse(callback, "no code of your own is called when a turn is over; set it to null")
    if (sheet.whole(repeats) or 1) > 1:
        sheet.refuse(repeats, f"how often a prompt is answered is {ROLLOUT}.n alone; set it to null")
    if not classes:
        sheet.refuse(ENABLE, f"nothing is named that answers a turn; {_ADVICE}")
    sheet.count("environment", ENABLE)


def brings_environment(native: Sequence[str]) -> bool:
    """Whether overrides of ours name what answers a turn."""
    return any(override.startswith(OWN) for override in native)
