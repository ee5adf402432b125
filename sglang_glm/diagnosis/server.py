"""What a given command line of the server resolves to on this machine."""

import contextlib
import io
from collections.abc import Iterator, Sequence

from sglang_glm.diagnosis.findings import Finding

_PART = "the given server arguments"

#: What SGLang decides from them, in the order of the report.
_RESOLVED = (
    "kv_cache_dtype",
    "attention_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "dsa_topk_backend",
    "moe_a2a_backend",
    "speculative_algorithm",
)


def check_command(argv: Sequence[str]) -> Iterator[Finding]:
    """Resolve the arguments as the server does at start; nothing is loaded.

    Args:
        argv: Arguments of `sglang.launch_server`; without any there is nothing to say.
    """
    if not argv:
        return
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            server_args = prepare_server_args(list(argv))
            server_args.resolve_once()
            view = resolving_view(server_args)
    except SystemExit:
        lines = complaints.getvalue().strip().splitlines()
        detail = lines[-1] if lines else "SGLang does not take them"
        yield _failed(detail.rpartition("error: ")[2])
        return
    except Exception as error:
        yield _failed(str(error) or type(error).__name__)
        return
    for name in _RESOLVED:
        flag = f"--{name.replace('_', '-')}"
        given = any(word.split("=")[0] == flag for word in argv)
        value = getattr(view, name)
        if value is None:
            continue
        yield Finding(
            part=_PART,
            name=flag,
            state="ok",
            detail=f"{value}, {'as given' if given else 'chosen without a flag'}",
        )


def _failed(detail: str) -> Finding:
    return Finding(
        part=_PART,
        name="sglang.launch_server",
        state="failed",
        detail=detail,
        remedy="correct the argument; python -m sglang.launch_server --help lists all",
    )
