"""A long prefix, computed once and reused.

Needs:  a running server with its prefix cache on (the default).
Run:    python cookbook/05_prefix_reuse.py --url http://127.0.0.1:30000 --tokens 8000
Expect: the second request finds all whole pages (64 tokens) of the prefix and answers sooner. Index
        keys are cached with the latents, or its selections would be wrong: in FP32 the text is the
        same token for token.
"""

from recipe import expect, flush_cache, generate, parser, run

PAGE = 64


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=8000, help="length of the shared prefix")
    arguments = made.parse_args()
    # Any ids do; these are ordinary text in every tokenizer of the family.
    prefix = [100 + index * 7 % 100 for index in range(arguments.tokens)]
    questions = [[*prefix, *range(100, 110 + extra)] for extra in (0, 5)]

    flush_cache(arguments.url)
    cold, cold_s = generate(arguments.url, 16, input_ids=questions[0])
    again, again_s = generate(arguments.url, 16, input_ids=questions[0])
    other, other_s = generate(arguments.url, 16, input_ids=questions[1])
    for name, answer, seconds in (
        ("first request", cold, cold_s),
        ("the same again", again, again_s),
        ("another question", other, other_s),
    ):
        cached = answer["meta_info"]["cached_tokens"]
        total = answer["meta_info"]["prompt_tokens"]
        print(f"{name:<18}{cached:>8} of {total} tokens cached {seconds:>8.2f} s")
    same = cold["output_ids"] == again["output_ids"]
    print(
        f"text after a prefix hit: {'the same' if same else 'differs (expected below FP32 only)'}"
    )

    # Drafts pair a token with the next one, which costs the last page at most.
    least = arguments.tokens // PAGE * PAGE - PAGE
    expect(cold["meta_info"]["cached_tokens"] == 0, "the cache was not empty after /flush_cache")
    for answer in (again, other):
        cached = answer["meta_info"]["cached_tokens"]
        expect(cached >= least, f"{cached} tokens cached, expected at least {least}")


if __name__ == "__main__":
    run(main)
