"""Each seam of the ledger in this process."""

from collections.abc import Iterator

from sglang_glm import envs
from sglang_glm.diagnosis.environment import sglang_requirement
from sglang_glm.diagnosis.findings import Finding


def check_seams() -> Iterator[Finding]:
    """Load the plugins as a server process does, then probe every row."""
    if not envs.ENABLE.get():
        yield Finding(
            part="seams",
            name="plugin",
            state="warning",
            detail=f"turned off by {envs.ENABLE.name}=0",
            remedy=f"unset {envs.ENABLE.name} to serve with sglang-glm",
        )
        return
    from sglang.srt.plugins import load_plugins

    from sglang_glm.compat.apply import active_scopes
    from sglang_glm.compat.ledger import SEAMS

    try:
        load_plugins()
    except SystemExit as stop:
        yield Finding(
            part="seams",
            name="plugin",
            state="failed",
            detail=str(stop),
            remedy=f"pip install '{sglang_requirement()}'",
        )
    scopes = active_scopes()
    for seam in SEAMS:
        name = f"{seam.target} ({seam.kind})"
        if seam.scope not in scopes:
            yield Finding(
                part="seams", name=name, state="not needed", detail=f"applies on {seam.scope}"
            )
            continue
        try:
            found = seam.check()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        yield Finding(
            part="seams",
            name=name,
            state="ok" if found is None else "failed",
            detail=found or "applied",
        )
