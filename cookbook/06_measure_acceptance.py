"""How many drafts are accepted, and what fewer steps would give.

Needs:  a server with drafts: --speculative-algorithm EAGLE --speculative-num-steps 5
        --speculative-eagle-topk 1 --speculative-num-draft-tokens 6.
Run:    python cookbook/06_measure_acceptance.py --url http://127.0.0.1:30000
        python cookbook/06_measure_acceptance.py --prompts my_traffic.txt     # a prompt a line
Expect: the share of rounds in which the first, second, ... draft was accepted, and the accept
        length for every number of steps up to the server's. Drafts are a chain: with fewer steps
        the first ones are the same, so one server tells about all. Use prompts of your own traffic;
        random tokens say nothing.
"""

from pathlib import Path

from recipe import expect, generate, get, parser, run

PROMPTS = (
    "Write a function that reverses a linked list, with a docstring.",
    "Explain in three paragraphs how a heat pump works.",
    "Summarise the plot of Don Quixote for a ten-year-old.",
    "List the prime numbers below one hundred.",
)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--prompts", type=Path, help="file with a prompt a line")
    made.add_argument("--new-tokens", type=int, default=256)
    arguments = made.parse_args()
    prompts = arguments.prompts.read_text().splitlines() if arguments.prompts else PROMPTS

    steps = get(arguments.url, "/server_info").json().get("speculative_num_steps")
    expect(steps, "the server drafts nothing; start it with --speculative-algorithm EAGLE")
    rounds = [0] * (steps + 1)
    for prompt in prompts:
        answer, seconds = generate(arguments.url, arguments.new_tokens, text=prompt)
        meta = answer["meta_info"]
        for accepted, count in enumerate(meta["spec_correct_drafts_histogram"]):
            rounds[accepted] += count
        print(f"{meta['completion_tokens'] / seconds:8.1f} tokens/s  {prompt[:60]}")

    total = sum(rounds)
    expect(total, "no verify round was counted")
    # at_least[i]: share of rounds in which draft i and all before it were right.
    at_least = [sum(rounds[step:]) / total for step in range(steps + 1)]
    print(f"\n{total} verify rounds with {steps} steps")
    print("steps  draft accepted  accept length")
    length = 1.0
    for step in range(1, steps + 1):
        length += at_least[step]
        print(f"{step:>5}{at_least[step]:>15.1%}{length:>15.2f}")
    print(
        "\nA step pays while what it adds to the accept length is more than what it adds to a round; "
        "`sglang-glm plan … --mtp-steps N` gives a round's time and the break-even."
    )


if __name__ == "__main__":
    run(main)
