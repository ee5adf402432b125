"""The DSA backends by name: what each is, and on which device and KV dtype it can serve.

SGLang's own flags choose among them: `--dsa-prefill-backend`, `--dsa-decode-backend` and
`--dsa-topk-backend` accept these names beside the stock ones.
"""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode", "topk"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DsaBackend:
    """One named form of one phase.

    Attributes:
        name: What the flag accepts.
        phases: The flags that accept it.
        devices: Where it runs.
        kv_dtypes: KV cache dtypes that it reads, by torch's names.
    """

    name: str
    phases: tuple[Phase, ...]
    devices: tuple[Device, ...]
    kv_dtypes: tuple[str, ...]


_FLOATS = ("float32", "bfloat16")
_PACKED = ("float8_e4m3fn",)
_HOST = _FLOATS + _PACKED
_CUDA = ("bfloat16", *_PACKED)

BACKENDS: tuple[DsaBackend, ...] = (
    # per request: dense within index_topk, otherwise masked or sparse, whichever costs less
    DsaBackend(name="glm_auto", phases=("prefill",), devices=("cpu",), kv_dtypes=_HOST),
    # per batch shape: ours where it was measured to be faster, otherwise SGLang's
    DsaBackend(name="glm_auto", phases=("decode",), devices=("cuda",), kv_dtypes=_CUDA),
    # attention over the whole context under a mask of the selection
    DsaBackend(name="glm_masked", phases=("prefill",), devices=("cpu",), kv_dtypes=_HOST),
    # gathers the selected rows, then attends to those alone
    DsaBackend(name="glm_sparse", phases=("prefill", "decode"), devices=("cpu",), kv_dtypes=_HOST),
    DsaBackend(name="glm_sparse", phases=("prefill", "decode"), devices=("cuda",), kv_dtypes=_CUDA),
    # exact and deterministic: higher score first, ties to the lower position
    DsaBackend(name="glm_exact", phases=("topk",), devices=("cpu",), kv_dtypes=_HOST),
    DsaBackend(name="glm_exact", phases=("topk",), devices=("cuda",), kv_dtypes=_CUDA),
)

#: What each phase uses on the CPU when no flag names a backend.
HOST_DEFAULTS: dict[Phase, str] = {
    "prefill": "glm_auto",
    "decode": "glm_sparse",
    "topk": "glm_exact",
}


def names(phase: Phase, device: Device | None = None) -> list[str]:
    """The names that `phase`'s flag accepts from us, on one device or on any."""
    found = (
        backend.name
        for backend in BACKENDS
        if phase in backend.phases and (device is None or device in backend.devices)
    )
    return list(dict.fromkeys(found))


def refusal(phase: Phase, name: str, *, device: Device, kv_dtype: str) -> str | None:
    """Why `name` cannot serve `phase` here, or None when it can.

    A name that is not ours is refused on the CPU, where no stock DSA backend runs, and left to
    SGLang elsewhere.
    """
    known = [b for b in BACKENDS if b.name == name and phase in b.phases]
    if not known:
        if device == "cpu":
            return (
                f"{name!r} needs a CUDA device; on the CPU choose one of "
                f"{', '.join(names(phase, 'cpu'))}"
            )
        return None
    found = next((b for b in known if device in b.devices), None)
    if found is None:
        devices = " and ".join(dict.fromkeys(d for b in known for d in b.devices))
        return f"{name!r} runs on {devices}, not on {device}; leave the flag out"
    if kv_dtype not in found.kv_dtypes:
        return f"{name!r} reads a KV cache of {', '.join(found.kv_dtypes)}, not {kv_dtype}"
    return None
