r"""The same requests to servers that differ in their DSA backends.

Needs:  one running server for each choice, for instance
          launch/serve_cpu.sh --port 30000 --dsa-prefill-backend glm_masked
          launch/serve_cpu.sh --port 30001 --dsa-prefill-backend glm_sparse
Run:    python cookbook/07_compare_dsa_backends.py --url http://127.0.0.1:30000 \
            --url http://127.0.0.1:30001
Expect: each server's backends, seconds for prefill and for decode, and whether its text is the
        first one's. Backends agree up to rounding: in FP32 the text is the same; in BF16 two tokens
        within rounding may change places, so only the largest difference of a log-probability
        counts.
"""

from recipe import expect, flush_cache, generate, get, parser, run

PHASES = ("prefill", "decode", "topk")


def main() -> None:
    made = parser(__doc__, url=None)
    made.add_argument("--url", action="append", required=True, help="a server; may be repeated")
    made.add_argument("--tokens", type=int, default=4000)
    made.add_argument("--new-tokens", type=int, default=64)
    made.add_argument("--max-diff", type=float, default=0.1, help="of a prompt's log-probability")
    arguments = made.parse_args()
    prompt = [100 + index * index % 97 for index in range(arguments.tokens)]

    first = None
    for url in arguments.url:
        info = get(url, "/server_info").json()
        backends = ", ".join(f"{phase} {info[f'dsa_{phase}_backend']}" for phase in PHASES)
        flush_cache(url)
        _, prefill_s = generate(url, 1, input_ids=prompt)
        answer, whole_s = generate(url, arguments.new_tokens, input_ids=prompt)
        scored, _ = generate(
            url, 1, input_ids=prompt[:2048], return_logprob=True, logprob_start_len=0
        )
        values = [row[0] for row in scored["meta_info"]["input_token_logprobs"][1:]]
        if first is None:
            first = answer["output_ids"], values
        same = answer["output_ids"] == first[0]
        diff = max(abs(a - b) for a, b in zip(values, first[1], strict=True))
        # The second request finds its prefix, so what is left of its time is decode.
        print(
            f"{url}: {backends}\n  prefill {prefill_s:.2f} s, decode {whole_s:.2f} s, text "
            f"{'the same' if same else 'differs'}, max |dlogp| {diff:.1e}"
        )
        expect(diff <= arguments.max_diff, f"{url} differs by {diff:.1e} from {arguments.url[0]}")


if __name__ == "__main__":
    run(main)
