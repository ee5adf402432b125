"""``sglang-glm verify``: a running server or a checkpoint against reference logits."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_glm.cli.progress import ProgressLine, counted
from sglang_glm.verification.behaviour import configure_behaviour, run_behaviour

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_glm.verification.client import ServerClient, ServerFacts
    from sglang_glm.verification.formats import CacheFormats
    from sglang_glm.verification.golden import GoldenEntry, Identity
    from sglang_glm.verification.oracle import Oracle
    from sglang_glm.verification.regression import Report

DESCRIPTION = """\
Compare what a server computes with reference logits: golden files, or transformers' own
GlmMoeDsaForCausalLM run now on the same tokens. The exit status is 1 when something differs.
A position after a near-tie, where rounding decides a selection, is excused and counted.
"""

EXAMPLES = """\
examples:
  a running server whose checkpoint is on this machine, against transformers:
    sglang-glm verify --url http://127.0.0.1:30000 --live
  a checkpoint: the stock server is started on a free port and ended afterwards:
    sglang-glm verify ./checkpoint --live
  which layer is the first that differs:
    sglang-glm verify ./checkpoint --layers
  a quantised checkpoint against the original:
    sglang-glm verify ./quantised --live --reference ./original --max-diff 0.05
  write golden files, and compare with them where transformers is not wanted:
    sglang-glm verify ./checkpoint --write-golden ./golden
    sglang-glm verify --url http://127.0.0.1:30000 --golden ./golden
  keep what a server says today, and compare the next release with it:
    sglang-glm verify --url http://127.0.0.1:30000 --write-golden ./today
    sglang-glm verify --url http://127.0.0.1:30000 --golden ./today --max-diff 0.1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="CHECKPOINT",
        help="directory to serve, or with --url what the server serves (default: as it says itself)",
    )
    parser.add_argument("--url", help="a running server, http://host:port")
    parser.add_argument(
        "--server-args",
        default="",
        metavar="='ARGS'",
        help="further arguments of the server that is started; on the CPU --dtype float32 is added "
        "unless a dtype is named",
    )

    reference = parser.add_argument_group("references")
    reference.add_argument(
        "--golden",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="a golden file or a folder of them; may be repeated",
    )
    reference.add_argument("--live", action="store_true", help="run transformers now")
    reference.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="checkpoint that transformers runs, if not the served one",
    )
    reference.add_argument(
        "--layers",
        nargs="?",
        const=Path(),
        type=Path,
        metavar="DUMP",
        help="find the first layer whose hidden states differ from transformers'; a server given by "
        "--url must have been started with --debug-tensor-dump-output-folder DUMP",
    )
    reference.add_argument(
        "--prompt-lengths",
        type=_lengths,
        metavar="N,N,…",
        help="prompt lengths (default: around index_topk and the page size)",
    )

    judgement = parser.add_argument_group("judgement and output")
    judgement.add_argument(
        "--max-diff",
        type=float,
        help="allowed difference of a log-probability (1e-5; 2e-3 with FP8 caches; a BF16 server is "
        "measured against transformers in BF16)",
    )
    judgement.add_argument("--json", action="store_true", help="print plain data")
    judgement.add_argument(
        "--write-golden",
        type=Path,
        metavar="DIR",
        help="write golden files instead of comparing: from transformers, or with --url what the "
        "server says",
    )
    reference.add_argument(
        "--behaviour",
        action="store_true",
        help="whether the trained tiny checkpoint retrieves, drafts and talks as it should",
    )
    configure_behaviour(parser)


def _lengths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths such as 5,64,130")
    return sorted({int(part) for part in parts})


def run(arguments: argparse.Namespace) -> int:
    """Verify, or write golden files.

    Returns:
        0, or 1 when something differs.

    Raises:
        ValueError: If the arguments do not make a comparison.
        RuntimeError: If the server cannot be reached or started.
    """
    behaviour = arguments.behaviour
    if arguments.checkpoint is None and arguments.url is None:
        raise ValueError("verify: got neither a CHECKPOINT nor --url, expected at least one")
    if arguments.write_golden is not None:
        return _write_golden(arguments)
    if not (arguments.golden or arguments.live or behaviour or arguments.layers is not None):
        raise ValueError(
            "verify: got nothing to compare with, expected --live, --golden PATH or --layers"
        )
    if arguments.layers == Path() and arguments.url is not None:
        raise ValueError(
            "verify: --layers with --url needs the folder that the server dumps to, as in "
            "--layers /tmp/dump; start the server with --debug-tensor-dump-output-folder /tmp/dump"
        )
    data: dict[str, Any] = {}
    texts, passed = [], True
    with _server(arguments) as (client, dump):
        if arguments.golden or arguments.live or dump is not None:
            report = _compare(arguments, client, dump)
            passed = report.passed
            data |= report.to_dict()
            texts.append(report.render())
        if behaviour:
            line = ProgressLine(counted("")).say
            outcome = run_behaviour(client.url, arguments, line)
            passed = passed and outcome.passed
            data["behaviour"] = outcome.to_dict()
            texts.append(outcome.render())
    print(json.dumps(data | {"passed": passed}, indent=2) if arguments.json else "\n\n".join(texts))
    return 0 if passed else 1


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[ServerClient, Path | None]]:
    """The server to ask, and the folder that it dumps hidden states to."""
    from sglang_glm.platform import has_accelerator
    from sglang_glm.verification.client import ServerClient
    from sglang_glm.verification.layers import DUMP_FLAG
    from sglang_glm.verification.local_server import LocalServer

    if arguments.url is not None:
        if arguments.server_args:
            raise ValueError(
                "verify: --server-args belongs to a server that is started here; drop it or --url"
            )
        yield ServerClient(arguments.url), arguments.layers
        return
    extra = shlex.split(arguments.server_args)
    if not has_accelerator() and not any(word.startswith("--dtype") for word in extra):
        extra = ["--dtype", "float32", *extra]
    with tempfile.TemporaryDirectory(prefix="sglang-glm-verify-") as workspace:
        dump = None
        if arguments.layers is not None:
            dump = Path(workspace) / "dump" if arguments.layers == Path() else arguments.layers
            extra += [DUMP_FLAG, str(dump)]
        line = ProgressLine(counted(""))
        with LocalServer(
            ["--model-path", str(_directory(arguments.checkpoint)), *extra],
            waiting=lambda seconds: line.say(f"waiting for the server, {seconds:.0f} s"),
        ) as server:
            yield ServerClient(server.url), dump


def _directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ValueError(
            f"verify: {path} has no config.json, expected a checkpoint directory; a running server "
            "is given by --url"
        )
    return path.resolve()


def _compare(arguments: argparse.Namespace, client: ServerClient, dump: Path | None) -> Report:
    from sglang_glm.verification import regression

    facts = client.facts()
    sources = [str(path) for path in arguments.golden]
    if arguments.live or dump is not None:
        sources.append("transformers")
    report = regression.new_report(client, facts, " and ".join(sources))
    if arguments.max_diff is not None:
        report.max_diff_allowed = arguments.max_diff
    progress = ProgressLine(counted("prompts"))
    if arguments.golden:
        if report.max_diff_allowed is None:
            raise ValueError(
                f"verify: the server computes in {facts.dtype}, whose error a golden file cannot "
                "judge; give --max-diff, or use --live, which measures it beside transformers"
            )
        regression.check_golden(
            report,
            client,
            facts,
            _read_golden(arguments.golden),
            served=_served(arguments, facts),
            progress=progress,
        )
    if not arguments.live and dump is None:
        return report
    oracle = _oracle(arguments, facts)
    vocab = _vocab(oracle.directory)
    if arguments.live:
        lengths = arguments.prompt_lengths or regression.live_lengths(
            oracle.config.index_topk, min(_longest(facts), 3 * oracle.config.index_topk)
        )
        regression.check_live(
            report, client, facts, oracle, lengths, vocab=vocab, progress=progress
        )
    if dump is not None:
        _add_layers(arguments, report, client, facts, oracle, vocab, dump)
    return report


def _add_layers(
    arguments: argparse.Namespace,
    report: Report,
    client: ServerClient,
    facts: ServerFacts,
    oracle: Oracle,
    vocab: int,
    dump: Path,
) -> None:
    import torch

    from sglang_glm.verification.decided import decided_prompt
    from sglang_glm.verification.layers import check_layers
    from sglang_glm.verification.oracle import Oracle

    lengths = arguments.prompt_lengths or [min(3 * oracle.config.index_topk, 200, _longest(facts))]
    prompt = decided_prompt(oracle, vocab, lengths[-1])
    if prompt is None:
        raise ValueError(
            f"verify: rounding decides every prompt of {lengths[-1]} tokens; give a shorter one by "
            "--prompt-lengths"
        )
    rounded = None
    if facts.dtype != "float32":
        rounded = Oracle(oracle.directory, formats=facts.formats, dtype=torch.bfloat16)
    report.layers = check_layers(client, dump, oracle, prompt, rounded=rounded)


def _longest(facts: ServerFacts) -> int:
    """Longest prompt with a continuation that the server takes; long enough for a reference."""
    from sglang_glm.verification.regression import NEW_TOKENS

    return max(1, min(facts.max_total_tokens, facts.max_input_tokens, 2100) - NEW_TOKENS)


def _reference_directory(arguments: argparse.Namespace, facts: ServerFacts | None) -> Path:
    named = arguments.reference or arguments.checkpoint
    path = Path(facts.model) if named is None and facts is not None else named
    if path is None or not (path / "config.json").is_file():
        raise ValueError(
            f"verify: {path} is no checkpoint directory on this machine; say which one transformers "
            "shall run by --reference DIR, or compare with --golden files"
        )
    return path.resolve()


def _oracle(arguments: argparse.Namespace, facts: ServerFacts | None) -> Oracle:
    from sglang_glm.verification.client import machine_memory_bytes
    from sglang_glm.verification.oracle import Oracle

    directory = _reference_directory(arguments, facts)
    config = json.loads((directory / "config.json").read_text())
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    # transformers runs in FP32: four bytes for each of FP8, two for each of BF16.
    needed = stored * (4 if config.get("quantization_config") else 2)
    if needed > machine_memory_bytes():
        raise ValueError(
            f"verify: transformers would need {needed / 1e9:,.0f} GB for {directory.name} in FP32 and "
            f"this machine has {machine_memory_bytes() / 1e9:,.0f} GB; record golden files from a "
            "server that is known to be right, by --url and --write-golden"
        )
    formats: CacheFormats | None = None
    if facts is not None and facts.dtype == "float32":
        formats = facts.formats
    print(f"  loading {directory.name} in transformers", file=sys.stderr, flush=True)
    return Oracle(directory, formats=formats)


def _vocab(directory: Path) -> int:
    from sglang_glm.verification.prompts import ordinary_vocab

    return ordinary_vocab(directory)


def _read_golden(paths: list[Path]) -> list[tuple[str, GoldenEntry]]:
    from sglang_glm.verification.golden import load_entry

    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not found or not all(file.is_file() for file in found):
            raise ValueError(
                f"verify: {path} holds no golden files, expected *.safetensors written by "
                "--write-golden"
            )
        files += found
    return [(file.stem, load_entry(file)) for file in files]


def _served(arguments: argparse.Namespace, facts: ServerFacts) -> Identity | None:
    from sglang_glm.verification.golden import identify

    directory = arguments.checkpoint or Path(facts.model)
    if not directory.is_dir():
        print(
            f"  the weights of {facts.model} are not on this machine; golden files are taken to be "
            "of the same",
            file=sys.stderr,
        )
        return None
    return identify(directory)


def _write_golden(arguments: argparse.Namespace) -> int:
    from sglang_glm.verification import recording
    from sglang_glm.verification.golden import save_entry

    directory: Path = arguments.write_golden
    progress = ProgressLine(counted("prompts"))
    if arguments.url is not None:
        from sglang_glm.verification.client import ServerClient

        client = ServerClient(arguments.url)
        facts = client.facts()
        served = _reference_directory(arguments, facts)
        lengths = arguments.prompt_lengths or recording.default_lengths(served, _longest(facts))
        entries = recording.record_server(
            client, facts, served, lengths, vocab=_vocab(served), progress=progress
        )
    else:
        oracle = _oracle(arguments, None)
        lengths = arguments.prompt_lengths or recording.default_lengths(oracle.directory, 2100)
        entries = recording.record_oracle(
            oracle, lengths, vocab=_vocab(oracle.directory), progress=progress
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, entry in entries:
        save_entry(entry, directory / f"{name}.safetensors")
        print(f"wrote {directory / name}.safetensors: {len(entry.rows)} log-probabilities")
    if not entries:
        raise RuntimeError(
            "verify: rounding decides every prompt tried; give other --prompt-lengths"
        )
    return 0
