"""An answer with two tool calls in the format of each tool-call parser of SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]

LEAD = "Let me look.\n"
CALLS: list[tuple[str, Arguments]] = [
    ("weather", {"city": "Zürich 🙂 北京", "days": 3}),
    ("search", {"query": 'shells, "16" {of} them\nand [more]', "deep": True}),
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "deep": {"type": "boolean"}},
            },
        },
    },
]


def _json(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _named(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return _json({"name": name, key: arguments})


def _each(format: Callable[[str, Arguments], str], between: str = "") -> str:
    return between.join(format(name, arguments) for name, arguments in CALLS)


def _text(value: Any) -> str:
    """A value in XML, where a string has no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _parameters(arguments: Arguments, format: str) -> str:
    return "".join(format.format(key, _text(value)) for key, value in arguments.items())


def _python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _keys_and_values(name: str, arguments: Arguments, end: str = "\n") -> str:
    pairs = f"<arg_key>{{}}</arg_key>{end}<arg_value>{{}}</arg_value>{end}"
    return f"<tool_call>{name}{end}{_parameters(arguments, pairs)}</tool_call>"


def _on_one_line(name: str, arguments: Arguments) -> str:
    return _keys_and_values(name, arguments, end="")


def _dsml(name: str, arguments: Arguments) -> str:
    body = ""
    for key, value in arguments.items():
        string = str(isinstance(value, str)).lower()
        tag = "｜DSML｜parameter"
        body += f'<{tag} name="{key}" string="{string}">{_text(value)}</{tag}>\n'
    return f'<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>\n'


def _gemma(name: str, arguments: Arguments) -> str:
    quoted = []
    for key, value in arguments.items():
        stated = f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)
        quoted.append(f"{key}:{stated}")
    return f"<|tool_call>call:{name}{{{','.join(quoted)}}}<tool_call|>"


def _coder(name: str, arguments: Arguments) -> str:
    body = _parameters(arguments, "<parameter={}>\n{}\n</parameter>\n")
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>\n"


def _mimo(name: str, arguments: Arguments) -> str:
    body = _parameters(arguments, "<parameter={}>{}</parameter>\n")
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>\n"


def _minicpm(name: str, arguments: Arguments) -> str:
    body = _parameters(arguments, '<param name="{}"><![CDATA[{}]]></param>')
    return f'<function name="{name}">{body}</function>'


def _minimax(name: str, arguments: Arguments) -> str:
    body = _parameters(arguments, '<parameter name="{}">{}</parameter>\n')
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>\n'


def _step(name: str, arguments: Arguments) -> str:
    body = _parameters(arguments, '<steptml:parameter name="{}">{}</steptml:parameter>')
    invoke = f'<steptml:invoke name="{name}">{body}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"


def _kimi() -> str:
    calls = ""
    for i, (name, arguments) in enumerate(CALLS):
        calls += (
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
            f"{_json(arguments)}<|tool_call_end|>"
        )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def _harmony(name: str, arguments: Arguments) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name}"
        f"<|constrain|>json<|message|>{_json(arguments)}<|call|>"
    )


def _qwen(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{_named(name, arguments)}\n</tool_call>"


def _hermes(name: str, arguments: Arguments) -> str:
    return f"<tool_call>{_named(name, arguments)}</tool_call>"


def _deepseek(name: str, arguments: Arguments) -> str:
    code = f"```json\n{_json(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{code}<｜tool▁call▁end｜>"


def _deepseek31(name: str, arguments: Arguments) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"


def _internlm(name: str, arguments: Arguments) -> str:
    return f"<|action_start|> <|plugin|>\n{_named(name, arguments, 'parameters')}<|action_end|>"


def _hunyuan(name: str, arguments: Arguments) -> str:
    pairs = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    body = _parameters(arguments, pairs)
    return f"<tool_call>{name}<tool_sep>\n{body}</tool_call>\n"


def _cohere() -> str:
    actions = []
    for i, (name, arguments) in enumerate(CALLS):
        actions.append({"tool_call_id": str(i), "tool_name": name, "parameters": arguments})
    return f"<|START_ACTION|>{json.dumps(actions, ensure_ascii=False)}<|END_ACTION|>"


_deepseek_calls = f"<｜tool▁calls▁begin｜>{_each(_deepseek, chr(10))}<｜tool▁calls▁end｜>"
_apertus = ", ".join(_json({name: arguments}) for name, arguments in CALLS)
_mistral = f"[TOOL_CALLS] [{_each(_named, ', ')}]"
_glm = LEAD + _each(_keys_and_values, "\n")
_coders = LEAD + _each(_coder)

# By parser. Those that are here twice in SGLang's table under other names are here once.
ANSWERS = {
    "apertus2509": f"{LEAD}<|tools_prefix|>[{_apertus}]<|tools_suffix|>",
    "cohere_command4": LEAD + _cohere(),
    "deepseekv3": LEAD + _deepseek_calls,
    "deepseekv31": f"{LEAD}<｜tool▁calls▁begin｜>{_each(_deepseek31)}<｜tool▁calls▁end｜>",
    "deepseekv32": f"{LEAD}<｜DSML｜function_calls>\n{_each(_dsml)}</｜DSML｜function_calls>",
    "deepseekv4": f"{LEAD}<｜DSML｜tool_calls>\n{_each(_dsml)}</｜DSML｜tool_calls>",
    "gemma4": LEAD + _each(_gemma),
    "gigachat3": f"{LEAD}<|function_call|>{_named(*CALLS[0])}",
    "glm45": _glm,
    "glm47": LEAD + _each(_on_one_line),
    "gpt-oss": _each(_harmony),
    "hermes": LEAD + _each(_hermes, "\n"),
    "hunyuan": f"{LEAD}<tool_calls>\n{_each(_hunyuan)}</tool_calls>",
    "interns1": LEAD + _each(_internlm, "\n"),
    "kimi_k2": LEAD + _kimi(),
    "lfm2": f"{LEAD}<|tool_call_start|>[{_each(_python, ', ')}]<|tool_call_end|>",
    "llama3": f"{LEAD}<|python_tag|>{_each(_named, ';')}",
    "mimo": LEAD + _each(_mimo),
    "minicpm5": LEAD + _each(_minicpm, "\n"),
    "minimax-m2": LEAD + _each(_minimax),
    "mistral": LEAD + _mistral,
    "poolside_v1": _glm,
    "pythonic": f"{LEAD}[{_each(_python, ', ')}]",
    "qwen25": LEAD + _each(_qwen, "\n"),
    "qwen3_coder": _coders,
    "step3": f"{LEAD}<｜tool_calls_begin｜>{_each(_step, chr(10))}<｜tool_calls_end｜>",
    "trinity": f"<think>Hm.</think>{LEAD}{_each(_qwen, chr(10))}",
}
