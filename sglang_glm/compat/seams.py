"""What a seam is: one place of SGLang that we extend, hook or replace, and how to see that it took."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "registry",
    "platform",
    "resolution_hook",
    "oot_forward",
    "after",
    "before",
    "around",
    "replace",
    "setting",
]
Scope = Literal["everywhere", "host", "cuda"]

#: Ways to enter SGLang, gentlest first. A row below "platform" says why a gentler way does not do.
KINDS: tuple[Kind, ...] = (
    "registry",
    "platform",
    "resolution_hook",
    "oot_forward",
    "setting",
    "after",
    "before",
    "around",
    "replace",
)
_HOOKS = ("after", "before", "around", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One row of the ledger.

    Attributes:
        target: Dotted path in SGLang; for a resolution hook, the step's name.
        kind: How we enter; one of `KINDS`.
        scope: Where it applies: "everywhere", on the CPU "host" platform, or on "cuda".
        implementation: `module:attribute` of ours that is put there.
        why: What SGLang does without it.
        remove_when: The change upstream that makes this row unnecessary.
        probe: Returns None when the seam is in effect, otherwise what was found instead.
            Hooks have a default probe; other kinds must bring one.
    """

    target: str
    kind: Kind
    scope: Scope
    implementation: str
    why: str
    remove_when: str
    probe: Callable[[], str | None] | None = None

    def load(self) -> Any:
        """Our object for this seam."""
        return pkgutil.resolve_name(self.implementation)

    def check(self) -> str | None:
        """None when the seam is in effect, otherwise what was found instead."""
        if self.probe is not None:
            return self.probe()
        if self.kind in _HOOKS:
            return self._check_hook()
        raise TypeError(f"seam {self.target} of kind {self.kind} has no probe")

    def _check_hook(self) -> str | None:
        found = pkgutil.resolve_name(self.target)
        ours = self.load()
        if isinstance(ours, type):
            return None if found is ours else f"found {found!r}"
        from sglang.srt.plugins.hook_registry import HookRegistry

        if self.target not in HookRegistry._patched:
            return "SGLang did not apply the hook"
        if not any(hook is ours for _, hook, _ in HookRegistry._hooks[self.target]):
            return "our hook is not registered"
        return None if hasattr(found, "__wrapped__") else f"found {found!r}, which wraps nothing"
