"""The positions that the indexer selects are those that transformers' indexer selects.

SGLang's `--enable-return-indexer-topk` returns every row's selection; sets are compared, since
neither side promises an order to the other.
"""

import base64

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.parity import check, clean_prompt, compare, reference
from tests.support.server import Server, ServerSpec
from tests.support.specs import SELECTIONS, TRUTH, TRUTH_8


def _spec(*shape: str) -> ServerSpec:
    return ServerSpec(checkpoint(*shape), (*TRUTH, SELECTIONS))


SPECS = {
    "8 layers, topk 8": TRUTH_8,
    "1 layer, topk 2": _spec("--layers", "1", "--first-k-dense-replace", "0", "--index-topk", "2"),
    "4 layers, topk 16": _spec("--layers", "4", "--index-topk", "16"),
}

each_shape = pytest.mark.parametrize(
    "server",
    [
        pytest.param(spec, marks=[] if spec is TRUTH_8 else [pytest.mark.slow])
        for spec in SPECS.values()
    ],
    ids=SPECS,
    indirect=True,
)


def selections(answer: dict, num_layers: int) -> torch.Tensor:
    """`[rows, num_layers, index_topk]` int32, each row ascending with -1 at the tail."""
    raw = base64.b64decode(answer["meta_info"]["indexer_topk"])
    rows = len(answer["output_ids"]) + answer["meta_info"]["prompt_tokens"] - 1
    selected = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(rows, num_layers, -1)
    beyond = torch.iinfo(torch.int32).max
    ordered = selected.masked_fill(selected < 0, beyond).sort(-1).values
    return ordered.masked_fill(ordered == beyond, -1)


@each_shape
@pytest.mark.parametrize("length", [1, 7, 40, 300])
def test_same_sets(server: Server, length: int) -> None:
    """Prefill in chunks, then decode: every row of every layer."""
    ids = clean_prompt(server, length)
    server.flush_cache()
    answer = server.generate(ids, max_new_tokens=12, return_indexer_topk=True)
    run = reference(server.spec.model).run([*ids, *answer["output_ids"]])
    num_layers = run_layers(server)
    got = selections(answer, num_layers)
    compared = run.first_near_tie() or len(got)
    assert compared >= length, "a clean prompt's rows must all be compared"
    want = torch.empty(0)
    for layer in range(num_layers):
        # A shared layer uses, and returns, the selection of the last full layer before it.
        want = run.selections.get(layer, want)
        assert torch.equal(got[:compared, layer], want[:compared]), f"layer {layer}"
    check(compare(server, answer, ids))


@pytest.mark.parametrize("server", [TRUTH_8], indirect=True)
def test_after_a_prefix_hit(server: Server) -> None:
    """Rows of a reused prefix keep the selections of the request that computed them."""
    ids = clean_prompt(server, 300)
    server.flush_cache()
    cold = server.generate(ids, max_new_tokens=4, return_indexer_topk=True)
    warm = server.generate(
        ids, max_new_tokens=4, return_indexer_topk=True, logprob_start_len=len(ids) - 1
    )
    assert warm["meta_info"]["cached_tokens"] == 256
    num_layers = run_layers(server)
    assert torch.equal(selections(warm, num_layers), selections(cold, num_layers))


def run_layers(server: Server) -> int:
    """Decoder layers of the server's checkpoint, the MTP layer not counted."""
    return reference(server.spec.model).oracle.config.num_hidden_layers
