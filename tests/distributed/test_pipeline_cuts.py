"""Two pipeline stages, cut at every layer, give what the whole model gives (T22).

test_cut            prefill and decode logits of ragged requests, most longer than index_topk
test_carried        a selection crosses exactly where the next stage starts on a shared layer
test_three_stages   a middle stage of shared layers alone passes on the selection that it received
test_stage_layers   stages are those that SGLang makes; a partition that does not add up is refused
"""

from __future__ import annotations

import pytest
import torch

from sglang_glm.parallel.stages import carries_selection, stage_layers
from sglang_glm.planning.released import load_config
from tests.support.checkpoints import checkpoint
from tests.support.ranks import run_ranks

MODEL = checkpoint("--mtp", "--index-topk", "16")
CONFIG = load_config(MODEL)
LAYERS = CONFIG.num_hidden_layers
CUTS = {f"{cut}": (cut, LAYERS - cut) for cut in range(1, LAYERS)}
#: The middle stage has layer 4 alone, and layers 3 to 5 share the selection of layer 2.
THREE = (4, 1, LAYERS - 5)
LENGTHS, STEPS = (40, 5, 70), 3


def program(rank: int) -> dict:
    """Everything that this file looks at: building an engine costs more than all cuts."""
    from tests.support.engine import Engine, Stages

    engine = Engine(
        MODEL, "--dtype", "float32", "--max-total-tokens", "2048", "--disable-radix-cache"
    )
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 900, (n,), generator=rng).tolist() for n in LENGTHS]
    found = {"whole": engine.logits(prompts, STEPS)}
    for name, partition in {**CUTS, "three": THREE}.items():
        stages = Stages(*(engine.stage(rank, partition) for rank in range(len(partition))))
        with engine.serving(stages):
            found[name] = engine.logits(prompts, STEPS)
        found[f"{name} sent"] = stages.sent
    return found


@pytest.fixture(scope="module")
def found() -> dict:
    return run_ranks(program, 1)[0]


def check(found: dict, name: str) -> None:
    for whole, cut in zip(found["whole"], found[name], strict=True):
        torch.testing.assert_close(cut, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", CUTS)
def test_cut(found: dict, cut: str) -> None:
    check(found, cut)


@pytest.mark.parametrize("cut", CUTS)
def test_carried(found: dict, cut: str) -> None:
    carried = ["topk_indices"] if carries_selection(CONFIG, int(cut)) else []
    assert found[f"{cut} sent"] == [["hidden_states", "residual", *carried]]
    assert carries_selection(CONFIG, int(cut)) == (int(cut) in (3, 4, 5, 7))


def test_three_stages(found: dict) -> None:
    check(found, "three")
    assert found["three sent"] == [["hidden_states", "residual", "topk_indices"]] * 2


@pytest.mark.parametrize("pp_size", [1, 2, 3, 5, 8])
def test_stage_layers(pp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed.utils import get_pp_indices

    monkeypatch.delenv("SGLANG_PP_LAYER_PARTITION", raising=False)
    for num_layers in (8, 9, 78):
        stages = stage_layers(num_layers, pp_size)
        assert [(s.start, s.stop) for s in stages] == [
            get_pp_indices(num_layers, stage, pp_size) for stage in range(pp_size)
        ]
    assert stage_layers(8, 3, "4,1,3") == (range(4), range(4, 5), range(5, 8))
    for partition in ("4,4,1", "4,4", "8,0,0", "a,b,c"):
        with pytest.raises(ValueError, match="expected 3 positive numbers"):
            stage_layers(8, 3, partition)
    with pytest.raises(ValueError, match="--pp-size 9 with 8 layers"):
        stage_layers(8, 9)
