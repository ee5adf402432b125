"""Draft settings that cannot be served on the CPU are refused at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm.compat.host import speculative_hook
from sglang_glm.compat.host.speculative_hook import handle_speculative_decoding

SERVED: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "attention_backend": "dsa",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "speculative_draft_attention_backend": None,
    "speculative_eagle_topk": 1,
    "speculative_use_rejection_sampling": False,
    "enable_multi_layer_eagle": False,
}


def resolve(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str = "GlmMoeDsaForCausalLM",
    **changed: Any,
) -> list[Any]:
    """Resolve `SERVED` with changes; returns what SGLang's own step was called with."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    monkeypatch.setattr(speculative_hook, "resolved_view", lambda args: args)
    monkeypatch.setattr(speculative_hook, "model_config_of", lambda view: config)
    calls: list[Any] = []
    handle_speculative_decoding(SimpleNamespace(**{**SERVED, **changed}), calls.append)
    return calls


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native"),
        ({"speculative_draft_attention_backend": "triton"}, "--speculative-draft-attention-back"),
        ({"decode_attention_backend": "fa3"}, "--decode-attention-backend fa3"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ],
)
def test_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named}.* on the CPU: "):
        resolve(monkeypatch, **changed)


def test_served_settings_pass_after_sglangs_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(resolve(monkeypatch)) == 1
    assert len(resolve(monkeypatch, speculative_draft_attention_backend="dsa")) == 1


def test_other_models_and_no_drafts_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = {"attention_backend": "torch_native"}
    assert len(resolve(monkeypatch, architecture="LlamaForCausalLM", **dense)) == 1
    assert len(resolve(monkeypatch, speculative_algorithm=None, **dense)) == 1
