"""Reasoning and answer, streamed apart from each other.

Needs:  a server started with --reasoning-parser auto (or glm45).
Run:    python cookbook/02_streaming_reasoning.py --url http://127.0.0.1:30000
Expect: reasoning first, then the answer, each in its own field; with thinking off, no reasoning.
        The tiny random checkpoint never ends its reasoning, so its answer stays empty.
"""

from recipe import expect, parser, run, stream, user


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--max-tokens", type=int, default=256)
    arguments = made.parse_args()
    question = user(
        "A bat and a ball cost 1.10 together, the bat 1.00 more. What does the ball cost?"
    )

    reasoning, answer = [], []
    for delta in stream(arguments.url, question, max_tokens=arguments.max_tokens):
        for kept, text in (
            (reasoning, delta.get("reasoning_content")),
            (answer, delta.get("content")),
        ):
            if text:
                kept.append(text)
                print(text, end="", flush=True)
    print(f"\n\n{len(reasoning)} pieces of reasoning, {len(answer)} of answer")
    expect(
        len(reasoning) > 1, "no reasoning arrived; start the server with --reasoning-parser auto"
    )

    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    deltas = list(stream(arguments.url, question, max_tokens=32, **quiet))
    expect(
        not any(delta.get("reasoning_content") for delta in deltas),
        "reasoning arrived although enable_thinking is false",
    )
    expect(any(delta.get("content") for delta in deltas), "no answer arrived without thinking")


if __name__ == "__main__":
    run(main)
