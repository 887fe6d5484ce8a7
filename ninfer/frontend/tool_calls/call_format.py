"""How a model writes a tool call, found out from its chat template.

    XML    <tool_call>        JSON   <tool_call>
           <function=NAME>           {"name": "NAME", "arguments": {...}}
           <parameter=KEY>           </tool_call>
           VALUE
           </parameter>
           </function>
           </tool_call>

A format says what a model was taught to write, so what a grammar should make it write. Reading is
more lenient: it takes both, see call_reader.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.frontend.conversation import TemplateMessage
from ninfer.frontend.template import ChatTemplate

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
FUNCTION_OPEN: Final = "<function="
FUNCTION_CLOSE: Final = "</function>"
PARAMETER_OPEN: Final = "<parameter="
PARAMETER_CLOSE: Final = "</parameter>"

_NAME, _KEY, _VALUE = "\U000f0001", "\U000f0002", "\U000f0003"


@dataclass(frozen=True, slots=True)
class XmlCallFormat:
    """A call is head NAME name_end (parameter_head KEY key_end VALUE parameter_end)* tail.

    A string is written as it is, any other value as JSON. Calls follow each other by `separator`.
    """

    head: str = f"{CALL_OPEN}\n{FUNCTION_OPEN}"
    name_end: str = ">\n"
    parameter_head: str = PARAMETER_OPEN
    key_end: str = ">\n"
    parameter_end: str = f"\n{PARAMETER_CLOSE}\n"
    tail: str = f"{FUNCTION_CLOSE}\n{CALL_CLOSE}"
    separator: str = "\n"


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """A call is head NAME name_end ARGUMENTS tail; the arguments are a JSON object."""

    head: str = f'{CALL_OPEN}\n{{"name": "'
    name_end: str = '", "arguments": '
    tail: str = f"}}\n{CALL_CLOSE}"
    separator: str = "\n"


CallFormat = XmlCallFormat | JsonCallFormat


def find_call_format(template: ChatTemplate) -> CallFormat:
    """The format in which the template renders calls of earlier turns; JSON, the older one, when
    it renders none.

    Raises ModelFileError when the template exceeds its bounds on a few words.
    """
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    call = {"type": "function", "function": function}
    turns: list[TemplateMessage] = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = template.probe(turns, add_generation_prompt=False) or ""
    is_xml = f"{FUNCTION_OPEN}{_NAME}>" in text and f"{PARAMETER_OPEN}{_KEY}>" in text
    return XmlCallFormat() if is_xml else JsonCallFormat()
