"""Servers that the ordinary suite has no room for.

test_topk_2048          prompts around the released index_topk and far below it, against transformers
test_ragged_2048        the same in one batch
test_full_context       requests that end exactly at a context of a whole number of pages (known fault T44)
test_llama              another architecture on the same platform
test_named_prefill      both explicit prefill forms, in chunks of one page and of everything
"""

import json
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.parity import check, clean_prompt, compare, compare_all, prompt
from tests.support.server import Server, ServerSpec
from tests.support.specs import TRUTH_8

pytestmark = pytest.mark.slow

TOPK_2048 = ServerSpec(
    checkpoint("--index-topk", "2048"),
    ("--dtype", "float32", "--chunked-prefill-size", "1024", "--max-total-tokens", "16384"),
)
CONTEXT_256 = ServerSpec(
    TRUTH_8.model, ("--dtype", "float32", "--context-length", "256", "--max-total-tokens", "2048")
)
#: SGLang lets prompt and answer together fill all but two positions of the context.
ROOM = 254

#: With chunks of one page, and with chunks that hold every prompt.
MASKED, SPARSE = (
    ServerSpec(
        TRUTH_8.model,
        (*TRUTH_8.args, "--dsa-prefill-backend", form, "--chunked-prefill-size", chunk),
    )
    for form, chunk in (("glm_masked", "64"), ("glm_sparse", "4096"))
)


@pytest.mark.parametrize("server", [TOPK_2048], indirect=True, ids=["topk2048"])
@pytest.mark.parametrize(
    "length", [1, 2, 63, 64, 65, 2040, 2045, 2046, 2047, 2048, 2049, 2050, 2300]
)
def test_topk_2048(server: Server, length: int) -> None:
    server.flush_cache()
    ids = clean_prompt(server, length)
    check(compare(server, server.generate(ids, max_new_tokens=12), ids))


@pytest.mark.parametrize("server", [TOPK_2048], indirect=True, ids=["topk2048"])
def test_ragged_2048(server: Server) -> None:
    server.flush_cache()
    prompts = [clean_prompt(server, length) for length in (5, 64, 2047, 2100)]
    check(compare_all(server, prompts, max_new_tokens=12))


@pytest.mark.parametrize("server", [CONTEXT_256], indirect=True, ids=["context256"])
def test_full_context(server: Server) -> None:
    prompts = [prompt(server, length, seed=length) for length in (64, 128, 200, 249, 5)]
    for ids in prompts:
        alone = server.generate(ids, max_new_tokens=ROOM - len(ids))
        assert len(alone["output_ids"]) == ROOM - len(ids)
    answers = [
        server.generate(ids, max_new_tokens=ROOM - len(ids))["output_ids"] for ids in prompts
    ]
    batch = server.generate(prompts, max_new_tokens=6)
    assert all(got["output_ids"] == want[:6] for got, want in zip(batch, answers, strict=True))
    server.wait_idle()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return ServerSpec(
        str(directory),
        ("--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "4096"),
    )


def test_llama(llama: ServerSpec, pool) -> None:
    from transformers import LlamaForCausalLM

    server = pool.get(llama)
    ids = [(7 * i) % 500 + 3 for i in range(40)]
    answer = server.generate(ids)
    model = LlamaForCausalLM.from_pretrained(llama.model, dtype=torch.float32)
    tokens = torch.tensor([ids + answer["output_ids"]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    for offset, (got, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        assert abs(got - logprobs[len(ids) - 1 + offset, token].item()) < 1e-4
    architectures = json.loads((Path(llama.model) / "config.json").read_text())["architectures"]
    assert architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("server", [MASKED, SPARSE], indirect=True, ids=["masked", "sparse"])
@pytest.mark.parametrize("length", [7, 8, 9, 65, 300, 700])
def test_named_prefill(server: Server, length: int) -> None:
    server.flush_cache()
    ids = clean_prompt(server, length)
    check(compare(server, server.generate(ids), ids))
