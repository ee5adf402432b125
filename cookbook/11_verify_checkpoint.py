"""A new checkpoint, checked before it takes traffic.

Needs:  a server on this machine that runs the checkpoint, and memory for transformers to run it in
        FP32. For a model too large for that, record golden files from a server that is known to be
        right (`sglang-glm verify --url URL --write-golden DIR`) and give them by --golden.
Run:    python cookbook/11_verify_checkpoint.py --url http://127.0.0.1:30000
Expect: every log-probability within the bound, on prompts around index_topk and the page size. On a
        difference `sglang-glm verify CHECKPOINT --layers` names the first layer that has it.
"""

from recipe import expect, get, parser, run

from sglang_glm.cli.main import main as sglang_glm


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--golden", help="a folder of golden files, instead of transformers")
    made.add_argument("--lengths", help="prompt lengths, by comma")
    arguments = made.parse_args()
    print(f"serving {get(arguments.url, '/model_info').json()['model_path']}")
    words = ["verify", "--url", arguments.url]
    words += ["--golden", arguments.golden] if arguments.golden else ["--live"]
    words += ["--prompt-lengths", arguments.lengths] if arguments.lengths else []
    expect(sglang_glm(words) == 0, "the checkpoint is not served as the reference says")


if __name__ == "__main__":
    run(main)
