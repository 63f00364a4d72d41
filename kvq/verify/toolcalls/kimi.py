"""Tool calls in the text of Kimi K2, as its chat template writes them.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{JSON}
<|tool_call_end|>...<|tool_calls_section_end|>
"""

import re

from kvq.verify.toolcalls.calls import MalformedError, ParsedAnswer, ToolCall, json_object, split_reasoning

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
IDENTIFIER = re.compile(r"functions\.([\w.\-]+):(\d+)")


def parse_kimi(text: str) -> ParsedAnswer:
    """Every call in an answer. Pure; never raises."""
    _, answer = split_reasoning(text)
    content, mark, rest = answer.partition(SECTION)
    problems = [f"{stray} stands outside of a section" for stray in (CALL, CALL_END, ARGUMENTS) if stray in content]
    if not mark:
        return ParsedAnswer(content.strip(), (), tuple(problems))
    section, end, after = rest.partition(SECTION_END)
    calls: list[ToolCall] = []
    before, *parts = section.split(CALL)
    if before.strip():
        problems.append(f"{before.strip()[:40]!r} stands where {CALL} belongs")
    for number, part in enumerate(parts, start=1):
        try:
            calls.append(_call(part))
        except MalformedError as error:
            problems.append(f"call {number}: {error}")
    if not parts:
        problems.append("the section holds no call")
    if not end:
        problems.append("the section is cut off")
    elif SECTION in after or CALL in after:
        problems.append("there is a second section")
    return ParsedAnswer((content + after).strip(), tuple(calls), tuple(problems))


def _call(part: str) -> ToolCall:
    """From after the opening mark to before the next one."""
    inside, end, after = part.partition(CALL_END)
    if not end:
        raise MalformedError("it is cut off")
    if after.strip():
        raise MalformedError(f"{after.strip()[:40]!r} follows it")
    identifier, mark, arguments = inside.partition(ARGUMENTS)
    if not mark:
        raise MalformedError(f"it has no {ARGUMENTS}")
    found = IDENTIFIER.fullmatch(identifier.strip())
    if not found:
        raise MalformedError(f"{identifier.strip()[:40]!r} is not of the form functions.NAME:INDEX")
    return ToolCall(found[1], json_object(arguments))
