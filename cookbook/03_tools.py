"""A tool call and the answer that uses its result.

Needs:  a server started with --tool-call-parser auto (or glm47).
Run:    python cookbook/03_tools.py --url http://127.0.0.1:30000
Expect: one call of get_weather with a city that the schema allows, then a text. tool_choice is
        "required", so that even the tiny random checkpoint calls; drop it to let the model choose.
"""

import json

from recipe import chat, expect, parser, run, user

CITIES = ["Paris", "Oslo"]
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
    arguments = parser(__doc__).parse_args()
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    messages = user("What is the weather in Paris?")

    asked = chat(
        arguments.url, messages, tools=[TOOL], tool_choice="required", max_tokens=200, **quiet
    )["choices"][0]["message"]
    calls = asked.get("tool_calls") or []
    expect(calls, "no tool call arrived; start the server with --tool-call-parser auto")
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
