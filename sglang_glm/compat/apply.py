"""Registers the ledger's seams with SGLang and proves afterwards that each took effect."""

import os

from sglang_glm.compat.ledger import SEAMS
from sglang_glm.compat.seams import Scope, Seam
from sglang_glm.platform import has_cuda

_REMEDY = (
    "Install the tested SGLang (`pip install 'sglang>=0.5.23,<0.5.24'`), "
    "or set SGLANG_GLM_ENABLE=0 to run SGLang without sglang-glm."
)


def active_scopes() -> set[Scope]:
    """The scopes that this process needs: "host" where our CPU platform is the one in use."""
    from sglang.srt.platforms import current_platform

    if type(current_platform).__module__.startswith("sglang_glm."):
        return {"everywhere", "host"}
    return {"everywhere", "cuda"} if has_cuda() else {"everywhere"}


def needed_seams() -> list[Seam]:
    """The rows of the ledger that apply in this process, in the order in which they are applied."""
    scopes = active_scopes()
    return [seam for seam in SEAMS if seam.scope in scopes]


def apply_seams() -> None:
    """Register every needed seam. Each is probed right after SGLang has applied its hooks.

    Raises:
        SystemExit: a seam could not be registered or is not in effect; names it and the remedy.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    seams = needed_seams()
    for seam in seams:
        try:
            _register(seam)
        except Exception as error:
            raise _stop([(seam, f"{type(error).__name__}: {error}")]) from error

    apply_hooks = HookRegistry.apply_hooks

    def apply_and_probe() -> None:
        HookRegistry.apply_hooks = apply_hooks
        apply_hooks()
        failed = probe_seams(seams)
        if failed:
            raise _stop(failed)

    # load_plugins() applies all hooks after the last plugin has run: only then can they be probed.
    HookRegistry.apply_hooks = apply_and_probe


def probe_seams(seams: list[Seam]) -> list[tuple[Seam, str]]:
    """The seams that are not in effect, each with what was found."""
    failed = []
    for seam in seams:
        try:
            found = seam.check()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            failed.append((seam, found))
    return failed


def _register(seam: Seam) -> None:
    implementation = seam.load()
    match seam.kind:
        case "after" | "before" | "around" | "replace":
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            HookRegistry.register(seam.target, implementation, HookType(seam.kind))
        case "resolution_hook":
            from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

            register_resolution_hook(seam.target)(implementation)
        case "registry" | "oot_forward" | "setting":
            implementation()
        case "platform":
            pass  # SGLang asks our platform class itself


def _stop(failed: list[tuple[Seam, str]]) -> SystemExit:
    lines = [f"  {seam.target} ({seam.kind}): {found}" for seam, found in failed]
    return SystemExit(
        f"sglang-glm: process {os.getpid()} stops, since {len(failed)} place(s) of SGLang could not be entered:\n"
        + "\n".join(lines)
        + f"\n{_REMEDY}"
    )
