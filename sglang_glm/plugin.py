"""Entry point `sglang.srt.plugins`: enter SGLang, or stop the process with the reason.

SGLang calls `register()` in every process it starts, logs whatever it raises and goes on with the
stock model. A plugin that half works is worse than none, so every failure here leaves as
`SystemExit`, which the loader does not catch.
"""


def register() -> None:
    """Apply every seam of the ledger that this machine needs; probe each once SGLang applied it."""
    # Imported here, not above: SGLang imports this module while it is itself half imported.
    from sglang_glm import envs

    try:
        envs.check()
    except ValueError as error:
        raise SystemExit(f"sglang-glm: {error}") from None
    if not envs.ENABLE.get():
        return

    from sglang_glm.compat.apply import apply_seams

    apply_seams()
