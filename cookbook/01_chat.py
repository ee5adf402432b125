"""A conversation of two turns.

Needs:  a running server; any checkpoint.
Run:    python cookbook/01_chat.py --url http://127.0.0.1:30000
Expect: two answers, and more prompt tokens in the second turn than in the first. The tiny random
        checkpoint answers noise.
"""

from recipe import chat, expect, parser, run, user


def main() -> None:
    arguments = parser(__doc__).parse_args()
    # GLM thinks before it answers unless told not to.
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}

    messages = user("Name one river in Europe.")
    first = chat(arguments.url, messages, max_tokens=32, **quiet)
    answer = first["choices"][0]["message"]["content"]
    print(f"first:  {answer!r}")
    expect(answer, "the first answer is empty")

    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And one in Africa?"},
    ]
    second = chat(arguments.url, messages, max_tokens=32, **quiet)
    print(f"second: {second['choices'][0]['message']['content']!r}")
    usage = [turn["usage"]["prompt_tokens"] for turn in (first, second)]
    print(f"prompt tokens: {usage[0]}, then {usage[1]}")
    expect(usage[1] > usage[0], "the second turn does not contain the first")


if __name__ == "__main__":
    run(main)
