"""A tool call and the answer that uses its result.

Needs:  a server started with --tool-call-parser auto (or glm47).
Run:    python cookbook/03_tools.py --url http://127.0.0.1:30000
Expect: one call of get_weather with a city that the schema allows, then a text. A random checkpoint
        talks instead of calling: give it --forced, which leaves it no other words.
"""

import json

from recipe import chat, expect, parser, run, user

CITIES = ["Paris", "Oslo"]
#: A call as GLM writes it.
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>(Paris|Oslo)</arg_value></tool_call>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> str:
    """What a real tool would look up."""
    return json.dumps({"city": city, "sky": "clear", "celsius": 21})


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--forced", action="store_true", help="constrain the answer to a call")
    arguments = made.parse_args()
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    messages = user("What is the weather in Paris?")
    forced = {"regex": CALL} if arguments.forced else {}

    answered = chat(arguments.url, messages, tools=[TOOL], max_tokens=200, **quiet, **forced)
    asked = answered["choices"][0]["message"]
    calls = asked.get("tool_calls") or []
    expect(
        calls,
        f"no tool call in {asked.get('content', '')[:60]!r}; start the server with --tool-call-parser "
        "auto, or give a random checkpoint --forced",
    )
    call = calls[0]["function"]
    values = json.loads(call["arguments"])
    print(f"the model calls {call['name']}({values})")
    expect(call["name"] == "get_weather" and values["city"] in CITIES, f"an unknown call: {call}")

    result = get_weather(**values)
    messages += [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": result},
    ]
    answer = chat(arguments.url, messages, tools=[TOOL], tool_choice="none", max_tokens=64, **quiet)
    print(f"its answer to {result}: {answer['choices'][0]['message']['content']!r}")
    expect(answer["choices"][0]["message"]["content"], "the answer after the tool is empty")


if __name__ == "__main__":
    run(main)
