"""`sglang-glm plan`: text, JSON, picture, refusals, and the examples of --help."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from sglang_glm.cli import plan as plan_command
from sglang_glm.cli.main import main
from sglang_glm.planning import picture
from sglang_glm.planning.released import RELEASED
from tests.support.plans import DOCUMENT_EXAMPLES, HELP_EXAMPLES, make_parser


def run(arguments):
    return main(["plan", *arguments])


@pytest.mark.parametrize("model", list(RELEASED))
def test_released_models_are_known_without_a_network(model, capsys):
    assert run([model, "--tp", "16", "--ep", "16", "--context", "8k"]) == 0
    assert f"{model}: 75" in capsys.readouterr().out


def test_text_has_every_part(capsys):
    arguments = "zai-org/GLM-5.3 --tp 8 --attn-dp-size 8 --ep 8 --context 32k --concurrency 64"
    assert run(arguments.split()) == 0
    text = capsys.readouterr().out
    for part in (
        "753.3 B parameters",
        "memory of one GPU",
        "requests that fit",
        "decode step, one GPU",
        "verify, one GPU",
        "draft step, 4 times a round",
        "prefill of 1,024 tokens after 31,744",
        "dispatch, MoE, 75 x 3.146 MB",
        "break-even accept",
        "--mem-fraction-static",
        "Not modelled:",
    ):
        assert part in text


def test_json_is_complete_and_plain(capsys):
    assert run(["zai-org/GLM-5.3", "--ep", "8", "--context", "32k", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"]["total"] == 753_329_940_480
    assert content["kv"]["index_bytes_per_token"] == 2772
    assert content["decode"]["bounded_by"] == "routed experts"
    assert sum(phase["repeats"] for phase in content["mtp_round"]) == 6
    memory = content["memory_per_gpu_bytes"]
    parts = (memory["weights"], memory["driver"], memory["reserve"], memory["kv_pool"])
    assert sum(parts) == pytest.approx(memory["capacity"])
    assert content["launch"]["flags"][:2] == ["--model-path", "zai-org/GLM-5.3"]
    assert content["break_even_accept_length"]["roofline"] > 1


def test_json_says_why_there_are_no_flags(capsys):
    assert run(["zai-org/GLM-5.3", "--context", "1m", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert "no request of 1,048,576 tokens fits" in content["launch"]["refused"]


def test_own_checkpoint(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(RELEASED["zai-org/GLM-5.3"] | {"num_hidden_layers": 7}))
    assert run([str(config), "--tp", "1", "--context", "8k"]) == 0
    assert run([str(tmp_path), "--tp", "1", "--context", "8k"]) == 0
    assert "1 x h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("zai-org/GLM-4", "expected a config.json"),
        ("zai-org/GLM-5.3 --gpu a100", "gpu is 'a100'"),
        ("zai-org/GLM-5.3 --tp 8 --attn-dp-size 3", "--attn-dp-size 3 with --tp 8"),
        (
            "zai-org/GLM-5.3 --tp 8 --ep 4 --moe-a2a-backend deepep",
            "--ep-size 4 with --moe-a2a-backend",
        ),
        ("zai-org/GLM-5.3 --tp 4", "weights need"),
        ("zai-org/GLM-5.1 --weights fp8 --context 1m", "max_position_embeddings=202752"),
        ("zai-org/GLM-5.3 --mtp-steps -1", "num_steps is -1"),
        ("zai-org/GLM-5.3 --experts-hit 300", "experts_hit is 300"),
        ("zai-org/GLM-5.3 --picture plan.gif", "ending in .svg or .png"),
        ("zai-org/GLM-5.3 --picture none/plan.svg", "there is no folder none"),
        ("zai-org/GLM-5.3 --accept-length 7", "expected from 1 to 6"),
        ("zai-org/GLM-5.3 --accept-length nan", "accept_length is nan"),
        ("zai-org/GLM-5.3 --link-gb-per-s inf", "link_gb_per_s is inf"),
        ("zai-org/GLM-5.3 --expert-histogram none.json", "none.json is no file"),
        ("zai-org/GLM-5.3 --expert-record none.pt", "none.pt is no file"),
    ],
)
def test_refusals_are_one_sentence(arguments, message, capsys):
    assert run(arguments.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sglang-glm plan: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_answer_comes_first(capsys):
    arguments = "zai-org/GLM-5.3 --attn-dp-size 8 --ep 8 --context 32k --concurrency 64"
    assert run(arguments.split()) == 0
    assert (
        "=> 72 requests of 32,768 tokens fit; expected with 64: 31.6 ms a step, 2,023 token/s; "
        "MTP 43.5 ms a round, 5,154 token/s at 3.5 tokens a round, pays from 1.37"
    ) in capsys.readouterr().out.partition("\n\n")[0]
    assert run([*arguments.split(), "--mtp-steps", "0"]) == 0
    assert "MTP" not in capsys.readouterr().out.partition("=> ")[2].partition("\n")[0]


def test_more_requests_than_fit_are_told(capsys):
    words = "zai-org/GLM-5.3 --attn-dp-size 8 --ep 8 --context 128k --concurrency"
    assert run([*words.split(), "64"]) == 0
    assert "only 16 of the 64 requests fit at once" in capsys.readouterr().out
    assert run([*words.split(), "16"]) == 0
    assert "fit at once" not in capsys.readouterr().out


def test_an_accept_length_that_no_round_can_yield_is_not_shown(capsys):
    assert run(["zai-org/GLM-5.3", "--context", "8k", "--mtp-steps", "1"]) == 0
    assert "token/s at 2 " in capsys.readouterr().out


def glance():
    """Rows of the document's table: the command's arguments and the figures beside them."""
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    section = text.partition("## At a glance")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--gpu [^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 6
    return [(words, figures.split(" | ")) for words, figures in rows]


@pytest.mark.parametrize(("words", "figures"), glance())
def test_at_a_glance(words, figures, capsys):
    assert run(["zai-org/GLM-5.3", *words.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    times = plan["times_us"]
    kind = "roofline" if times["decode"]["expected"] is None else "expected"
    got = [
        f"{plan['memory_per_gpu_bytes']['weights'] / 1e9:.1f}",
        f"{plan['memory_per_gpu_bytes']['kv_pool'] / 1e9:.1f}",
        str(plan["capacity"]["requests_that_fit"]),
        f"{times['decode'][kind] / 1e3:.1f}",
        f"{times['mtp_round'][kind] / 1e3:.1f}",
        f"{plan['break_even_accept_length'][kind]:.1f}",
    ]
    assert [figure.rstrip(" *") for figure in figures] == got
    assert all(figure.endswith("*") for figure in figures[3:]) == (kind == "roofline")


def test_broken_json_is_refused(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text("{")
    assert run([str(config)]) == 1
    assert "is not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("128k", 131_072), ("1m", 1_048_576), ("2K", 2048)]
)
def test_token_counts(text, tokens):
    assert plan_command.parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5k", "0", "many"])
def test_bad_token_counts(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of tokens"):
        plan_command.parse_tokens(text)


@pytest.mark.parametrize("command", HELP_EXAMPLES)
def test_examples_of_the_help_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    small = RELEASED["zai-org/GLM-5.3"] | {"num_hidden_layers": 12}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(small))
    (tmp_path / "rows.jsonl").write_text(
        '{"op": "decode_step", "shape": "30000x8", "ms_per_step": 3}'
    )
    counts = torch.ones(1, 78, 256, dtype=torch.int32)
    torch.save({"rank": 0, "logical_count": counts}, tmp_path / "recorder.pt")
    assert run(shlex.split(command)) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", DOCUMENT_EXAMPLES)
def test_examples_of_the_document_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_expert_inputs_change_the_traffic(tmp_path, capsys):
    def decode_bytes(*extra):
        assert run(["zai-org/GLM-5.3", "--ep", "8", "--json", *extra]) == 0
        content = json.loads(capsys.readouterr().out)
        terms = {term["name"]: term["hbm_bytes"] for term in content["decode"]["terms"]}
        return terms["routed experts"]

    histogram = tmp_path / "hits.json"
    histogram.write_text(json.dumps({"3": [1] * 8 + [0] * 248}))
    uniform = decode_bytes()
    assert decode_bytes("--experts-hit", "64") < uniform
    # All eight used experts live on the first GPU, which reads 8 of its 32.
    one_gpu = decode_bytes("--expert-histogram", str(histogram))
    assert one_gpu == pytest.approx(decode_bytes("--experts-hit", "64"))


def test_links_are_given_in_gb_per_second(capsys):
    def reduce_us(*extra):
        arguments = ["zai-org/GLM-5.3", "--context", "8k", "--concurrency", "256", "--json"]
        assert run([*arguments, *extra]) == 0
        return json.loads(capsys.readouterr().out)["decode"]["collectives"][0]["time_us"]

    start_up = 78 * 5
    fast, slow = reduce_us("--link-gb-per-s", "450"), reduce_us("--link-gb-per-s", "45")
    assert fast == reduce_us()
    assert slow - start_up == pytest.approx(10 * (fast - start_up))
    assert run(["zai-org/GLM-5.3", "--network-gb-per-s", "0"]) == 1
    assert "network_gb_per_s is 0" in capsys.readouterr().err


def test_shared_verify_reads_shorten_the_round(capsys):
    def round_us(*extra):
        assert run(["zai-org/GLM-5.3", "--ep", "8", "--json", *extra]) == 0
        return json.loads(capsys.readouterr().out)["times_us"]["mtp_round"]["roofline"]

    assert round_us("--shared-verify-reads") < round_us()


def test_picture_in_characters(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(picture, "has_matplotlib", lambda: False)
    target = tmp_path / "plan.svg"
    assert run(["zai-org/GLM-5.3", "--ep", "8", "--picture", str(target)]) == 0
    captured = capsys.readouterr()
    assert not target.exists()
    assert "matplotlib is not installed" in captured.err
    assert "1,048,576 |####" in captured.err
    assert "routed experts |####" in captured.err


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_drawn_picture(suffix, magic, tmp_path, capsys):
    target = tmp_path / f"plan{suffix}"
    assert run(["zai-org/GLM-5.3", "--ep", "8", "--picture", str(target)]) == 0
    assert target.read_bytes().startswith(magic)
    assert f"wrote {target}" in capsys.readouterr().err


def test_picture_parts_sum_to_the_gpu():
    parsed = make_parser().parse_args(["zai-org/GLM-5.3", "--ep", "8"])
    plan = plan_command.make_plan(parsed)
    parts = picture.memory_parts_bytes(plan)
    assert sum(size for _, size in parts) == pytest.approx(plan.gpu.memory_bytes)
    contexts = picture.context_points_tokens(plan)
    assert (contexts[0], contexts[-1]) == (1024, 1_048_576)
    series = picture.decode_us_by_term(plan, contexts)
    assert series["index scoring"][-1] > series["index scoring"][0]
    assert series["routed experts"][-1] == series["routed experts"][0]
    gpus_per_node = plan.setup.layout.gpus_per_node
    sent = [call.time_us(plan.gpu, gpus_per_node) for call in plan.decode.collectives]
    assert len(sent) > 1
    assert series["collectives"][0] == pytest.approx(sum(sent))
