"""Facts hidden in a long text, asked for one by one.

Needs:  a running server with room for --tokens in its context. Sparse attention selects positions
        only behind index_topk (2,048 in GLM-5.x): ask for several times that.
Run:    python cookbook/04_long_context_retrieval.py --url http://127.0.0.1:30000 --tokens 30000
Expect: the share of facts found, by depth; 1 is required. A random checkpoint finds none: give it
        --min-recall 0.
"""

import random

from recipe import chat, expect, parser, run, user

FILLER = "The committee met on a grey morning and read the minutes of the last meeting aloud. "
NAMES = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "grove", "heron")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=30_000, help="length of the text, roughly")
    made.add_argument("--facts", type=int, default=4, choices=range(1, len(NAMES) + 1))
    made.add_argument("--min-recall", type=float, default=1.0)
    arguments = made.parse_args()
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}

    probe = chat(arguments.url, user(FILLER * 8), max_tokens=1, **quiet)
    empty = chat(arguments.url, user("."), max_tokens=1, **quiet)
    per_sentence = (probe["usage"]["prompt_tokens"] - empty["usage"]["prompt_tokens"]) / 8
    sentences = [FILLER] * max(arguments.facts, int(arguments.tokens / per_sentence))

    codes = {name: random.Random(name).randrange(1000, 10_000) for name in NAMES[: arguments.facts]}
    depths = [(index + 0.5) / arguments.facts for index in range(arguments.facts)]
    for (name, code), depth in zip(codes.items(), depths, strict=True):
        sentences[int(depth * len(sentences))] += f"The code of {name} is {code}. "
    text = "".join(sentences)

    found = 0
    for (name, code), depth in zip(codes.items(), depths, strict=True):
        question = f"{text}\n\nWhat is the code of {name}? Answer with the number alone."
        answer = chat(arguments.url, user(question), max_tokens=16, **quiet)
        said = answer["choices"][0]["message"]["content"]
        right = str(code) in said
        found += right
        print(
            f"{answer['usage']['prompt_tokens']:>8} tokens, depth {depth:4.0%}: "
            f"{'found' if right else f'{said[:40]!r} instead of {code}'}"
        )
    recall = found / arguments.facts
    print(f"recall {recall:.2f}")
    expect(recall >= arguments.min_recall, f"recall {recall:.2f} is below {arguments.min_recall}")


if __name__ == "__main__":
    run(main)
