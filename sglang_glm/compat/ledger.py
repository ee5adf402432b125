"""The ledger: every place of SGLang that this package enters, in the order of application."""

from sglang_glm.compat.seams import Seam

SEAMS: tuple[Seam, ...] = ()
