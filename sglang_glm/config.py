"""Facts of one `glm_moe_dsa` checkpoint, read once and refused early.

`GlmDsaConfig` is the only place where this package interprets a `config.json`. It imports nothing
beyond the standard library, so planning and layout code can use it on a machine without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

IndexerType = Literal["full", "shared"]

FP8_BLOCK = 128
"""Side of one block of the released FP8 checkpoints' weight scales."""

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURES = ("GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN")

# Fields whose only served value is the one of every released checkpoint, with the reason. A field
# that is absent takes this value, which is not always what SGLang assumes: see
# `fields_to_supply`.
_FIXED_FIELDS: dict[str, tuple[object, str]] = {
    "topk_method": ("noaux_tc", "the router adds e_score_correction_bias for selection only"),
    "scoring_func": ("sigmoid", "the router scores experts with a sigmoid"),
    "moe_layer_freq": (1, "every layer after first_k_dense_replace is a MoE layer"),
    "hidden_act": ("silu", "dense and expert MLPs are SwiGLU"),
    "attention_bias": (False, "the attention projections have no bias"),
    "mlp_bias": (False, "the MLP projections have no bias"),
    "tie_word_embeddings": (False, "embedding and head are separate weights"),
    "rope_interleave": (True, "attention RoPE rotates neighbouring pairs"),
    "indexer_rope_interleave": (
        True,
        "the GLM indexer rotates neighbouring pairs; half-split RoPE (DeepSeek-V3.2) selects "
        "wrong tokens as soon as the context passes index_topk",
    ),
    "index_kpool": (1, "one index key per token; pooled index keys belong to another model type"),
    "cli_factor": (1, "layers share selections by indexer_types, index_topk_pattern or freq"),
}

# Fields of the table above that SGLang 0.5.23 reads and transformers' config class does not define.
_READ_BY_SGLANG = ("topk_method", "scoring_func", "moe_layer_freq", "indexer_rope_interleave")

_POSITIVE_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)


def _refuse(field: str, got: object, expected: str, remedy: str) -> ValueError:
    return ValueError(f"GlmDsaConfig: {field} is {got!r}, expected {expected}; {remedy}")


class _Fields:
    """Attribute-or-key access to a Hugging Face config, `None` meaning absent."""

    def __init__(self, config: object) -> None:
        self._config = config

    def get(self, name: str) -> object:
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)

    def integer(self, name: str, *, default: int | None = None, minimum: int = 0) -> int:
        value = self.get(name)
        if value is None:
            if default is not None:
                return default
            raise _refuse(name, None, f"an integer >= {minimum}", f"add {name} to config.json")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise _refuse(name, value, f"an integer >= {minimum}", f"correct {name} in config.json")
        return value

    def number(self, name: str, *, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            raise _refuse(name, value, "a positive number", f"correct {name} in config.json")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _refuse(name, value, "true or false", f"correct {name} in config.json")
        return value


def is_glm_moe_dsa(architectures: Sequence[str] | None) -> bool:
    """Whether the `architectures` of a config.json name a model of this package."""
    return any(name in ARCHITECTURES for name in architectures or ())


def resolve_indexer_types(config: object) -> tuple[IndexerType, ...]:
    """Which layers run their own indexer ("full") and which reuse a selection ("shared").

    Three encodings exist, tried in this order, as `dsa_layer_skips_topk` of SGLang 0.5.23 and
    `GlmMoeDsaConfig` of transformers 5.19 do:

    1. `indexer_types`: one word per layer;
    2. `index_topk_pattern`: one letter per layer, `F` or `S`;
    3. `index_topk_freq` f and `index_skip_topk_offset` o: layer i is full when
       `max(i - o + 1, 0) % f == 0`; o is 2 when absent, f is 1 (every layer full, GLM-5 and 5.1).

    The first two may be longer than `num_hidden_layers` (a checkpoint served with fewer layers)
    and are cut there.

    Args:
        config: A Hugging Face config object or the dictionary of a `config.json`.

    Returns:
        `num_hidden_layers` words.

    Raises:
        ValueError: On an unknown word or letter, a list shorter than the model, a frequency or
            offset below 1, or a shared layer with no full layer before it. SGLang reads the first
            two cases as "full" without a word, which loads random indexer weights.
    """
    fields = _Fields(config)
    num_layers = fields.integer("num_hidden_layers", minimum=1)
    listed = fields.get("indexer_types")
    pattern = fields.get("index_topk_pattern")
    if listed is not None:
        types = _types_from_words("indexer_types", listed, {"full": "full", "shared": "shared"})
        source = "indexer_types"
    elif pattern is not None:
        types = _types_from_words("index_topk_pattern", pattern, {"F": "full", "S": "shared"})
        source = "index_topk_pattern"
    else:
        freq = fields.integer("index_topk_freq", default=1, minimum=1)
        offset = fields.integer("index_skip_topk_offset", default=2, minimum=1)
        types = tuple(
            "full" if max(layer_id - offset + 1, 0) % freq == 0 else "shared"
            for layer_id in range(num_layers)
        )
        source = "index_topk_freq"
    if len(types) < num_layers:
        raise _refuse(
            source,
            f"{len(types)} entries",
            f"at least num_hidden_layers={num_layers}",
            "give one entry per layer: SGLang treats the missing ones as full",
        )
    types = types[:num_layers]
    if types[0] != "full":
        raise _refuse(
            source,
            f"{types[0]!r} at layer 0",
            "'full' at layer 0",
            "a shared layer reuses the selection of an earlier full layer and layer 0 has none",
        )
    return types


def _types_from_words(
    field: str, words: object, meaning: dict[str, IndexerType]
) -> tuple[IndexerType, ...]:
    expected = " or ".join(repr(word) for word in meaning)
    if not isinstance(words, Sequence) or (isinstance(words, str) and field == "indexer_types"):
        raise _refuse(field, words, f"a sequence of {expected}", f"correct {field} in config.json")
    for layer_id, word in enumerate(words):
        if word not in meaning:
            raise _refuse(
                f"{field}[{layer_id}]",
                word,
                expected,
                "SGLang would treat any other spelling as a full layer",
            )
    return tuple(meaning[word] for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmDsaConfig:
    """Every fact of a `glm_moe_dsa` model that this package depends on.

    Names are those of `config.json`. Sizes are in elements unless the name says otherwise.

    Attributes:
        indexer_types: "full" or "shared" for each of the `num_hidden_layers` decoder layers. The
            MTP layer is not in it: it always has an indexer of its own.
        num_nextn_predict_layers: 0, or 1 for the MTP layer stored as layer `num_hidden_layers`.
        index_share_for_mtp_iteration: The draft steps of one round reuse one selection.
        quant_method: `quantization_config.quant_method`, `None` for a BF16 checkpoint.
        weight_block_size: `(rows, columns)` covered by one scale of a block-quantised weight.
        modules_not_quantized: Module names, prefixes or patterns that the checkpoint keeps in
            BF16, verbatim from `quantization_config`.
    """

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[IndexerType, ...]
    index_share_for_mtp_iteration: bool
    num_nextn_predict_layers: int
    rms_norm_eps: float
    rope_theta: float
    quant_method: str | None = None
    weight_block_size: tuple[int, int] | None = None
    modules_not_quantized: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, config: object) -> GlmDsaConfig:
        """Read a Hugging Face config and refuse what cannot be served.

        Args:
            config: A `PretrainedConfig`-like object or the dictionary of a `config.json`. Fields
                that some writers omit (`topk_method`, `scoring_func`, `moe_layer_freq`,
                `indexer_rope_interleave`, …) take the family's only value; see
                `fields_to_supply` for what SGLang must then be told.

        Returns:
            The validated facts.

        Raises:
            ValueError: Naming the field, its value, what was expected and what to do.
        """
        fields = _Fields(config)
        _check_model_type(fields)
        for name, (only_value, reason) in _FIXED_FIELDS.items():
            value = fields.get(name)
            if value is not None and value != only_value:
                raise _refuse(name, value, repr(only_value), reason)
        dims = {name: fields.integer(name, minimum=1) for name in _POSITIVE_FIELDS}
        quant_method, weight_block_size, modules_not_quantized = _read_quantization(fields)
        result = cls(
            **dims,
            first_k_dense_replace=fields.integer("first_k_dense_replace"),
            n_shared_experts=fields.integer("n_shared_experts"),
            n_group=fields.integer("n_group", default=1, minimum=1),
            topk_group=fields.integer("topk_group", default=1, minimum=1),
            norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
            routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
            indexer_types=resolve_indexer_types(config),
            index_share_for_mtp_iteration=fields.boolean(
                "index_share_for_mtp_iteration", default=False
            ),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", default=0),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-5),
            rope_theta=_read_rope_theta(fields),
            quant_method=quant_method,
            weight_block_size=weight_block_size,
            modules_not_quantized=modules_not_quantized,
        )
        result._check_relations()
        _check_redundant_fields(fields, result)
        return result

    def _check_relations(self) -> None:
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise _refuse(
                "first_k_dense_replace",
                self.first_k_dense_replace,
                f"at most num_hidden_layers={self.num_hidden_layers}",
                "the dense layers are the first of the decoder layers",
            )
        if self.num_nextn_predict_layers > 1:
            raise _refuse(
                "num_nextn_predict_layers",
                self.num_nextn_predict_layers,
                "0 or 1",
                "a draft longer than one token iterates the single MTP layer",
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise _refuse(
                "qk_rope_head_dim",
                self.qk_rope_head_dim,
                f"an even number <= index_head_dim={self.index_head_dim}",
                "RoPE rotates pairs in the first qk_rope_head_dim elements of an index key",
            )
        if self.topk_group > self.n_group or self.n_routed_experts % self.n_group:
            raise _refuse(
                "n_group",
                self.n_group,
                f"a divisor of n_routed_experts={self.n_routed_experts}, "
                f">= topk_group={self.topk_group}",
                "expert groups must be of equal size",
            )
        eligible_experts = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > eligible_experts:
            raise _refuse(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most {eligible_experts}, the experts a token may choose from",
                "lower it or raise n_routed_experts or topk_group",
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, the position-free and the rotated part together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements cached per token and layer: the latent and the shared rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on q·k before the softmax, `qk_head_dim ** -0.5`."""
        return float(self.qk_head_dim) ** -0.5

    @property
    def num_dense_layers(self) -> int:
        """Decoder layers with a dense MLP."""
        return self.first_k_dense_replace

    @property
    def num_moe_layers(self) -> int:
        """Decoder layers with routed experts, the MTP layer not counted."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def mtp_layer_id(self) -> int | None:
        """Layer number of the MTP weights in the checkpoint, `None` without MTP."""
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    @property
    def full_index_layer_ids(self) -> tuple[int, ...]:
        """Decoder layers that own an indexer and an index cache, the MTP layer not counted."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    def is_moe_layer(self, layer_id: int) -> bool:
        """Whether a checkpoint layer has routed experts; the MTP layer has."""
        self._check_layer_id(layer_id)
        return layer_id >= self.first_k_dense_replace

    def has_indexer(self, layer_id: int) -> bool:
        """Whether a checkpoint layer owns an indexer; the MTP layer does."""
        self._check_layer_id(layer_id)
        return layer_id == self.mtp_layer_id or self.indexer_types[layer_id] == "full"

    def index_source_layer_id(self, layer_id: int) -> int:
        """The layer whose selection a layer attends over: itself, or the last full one before."""
        self._check_layer_id(layer_id)
        if layer_id == self.mtp_layer_id:
            return layer_id
        return max(i for i in self.full_index_layer_ids if i <= layer_id)

    def _check_layer_id(self, layer_id: int) -> None:
        num_layers = self.num_hidden_layers + self.num_nextn_predict_layers
        if not 0 <= layer_id < num_layers:
            raise ValueError(
                f"GlmDsaConfig: layer_id is {layer_id}, expected 0 <= layer_id < {num_layers} "
                "(decoder layers, then the MTP layer)"
            )


def fields_to_supply(config: object) -> dict[str, object]:
    """Fields that SGLang 0.5.23 reads from a Hugging Face config and would get wrong or miss.

    `GlmMoeDsaConfig` of transformers 5.19 does not define them, so a config.json written by it
    lacks them: SGLang raises AttributeError for the router's fields and silently takes half-split
    RoPE in the indexer.

    Args:
        config: A config that `GlmDsaConfig.from_hf` accepts.

    Returns:
        Name and value of each absent field, to be set on the config before SGLang builds a model.
    """
    fields = _Fields(config)
    return {name: _FIXED_FIELDS[name][0] for name in _READ_BY_SGLANG if fields.get(name) is None}


def _check_model_type(fields: _Fields) -> None:
    model_type = fields.get("model_type")
    if model_type != MODEL_TYPE:
        raise _refuse(
            "model_type", model_type, repr(MODEL_TYPE), "serve other models with plain SGLang"
        )
    architectures = fields.get("architectures") or ARCHITECTURES
    if not isinstance(architectures, Sequence) or architectures[0] not in ARCHITECTURES:
        raise _refuse(
            "architectures",
            architectures,
            f"[{ARCHITECTURES[0]!r}]",
            "SGLang chooses the model class by its first entry",
        )


def _read_rope_theta(fields: _Fields) -> float:
    parameters = fields.get("rope_parameters")
    if parameters is None:
        # Configs older than transformers 5 spread the same facts over two top-level fields.
        scaling = fields.get("rope_scaling")
        scaling_type = _Fields(scaling).get("rope_type") or _Fields(scaling).get("type")
        parameters = {"rope_theta": fields.get("rope_theta"), "rope_type": scaling_type}
    rope = _Fields(parameters)
    rope_type = rope.get("rope_type") or "default"
    if rope_type != "default":
        raise _refuse(
            "rope_parameters.rope_type",
            rope_type,
            "'default'",
            "no released glm_moe_dsa checkpoint scales its RoPE; remove the scaling",
        )
    if rope.get("rope_theta") is None:
        raise _refuse(
            "rope_parameters.rope_theta", None, "a positive number", "add it to config.json"
        )
    return rope.number("rope_theta", default=0.0)


def _read_quantization(
    fields: _Fields,
) -> tuple[str | None, tuple[int, int] | None, tuple[str, ...]]:
    quantization = fields.get("quantization_config")
    if quantization is None:
        return None, None, ()
    quant = _Fields(quantization)
    method = quant.get("quant_method") or quant.get("quant_algo")
    if not isinstance(method, str):
        raise _refuse(
            "quantization_config.quant_method",
            method,
            "a name such as 'fp8'",
            "add it, or remove quantization_config for a BF16 checkpoint",
        )
    block = quant.get("weight_block_size")
    if block is not None and not (
        isinstance(block, Sequence)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise _refuse(
            "quantization_config.weight_block_size",
            block,
            "two positive integers",
            "correct it in config.json",
        )
    ignored = quant.get("modules_to_not_convert") or quant.get("ignore") or ()
    if isinstance(ignored, str) or not isinstance(ignored, Sequence):
        raise _refuse(
            "quantization_config.modules_to_not_convert",
            ignored,
            "a list of module names",
            "correct it in config.json",
        )
    weight_block_size = (block[0], block[1]) if block is not None else None
    return method, weight_block_size, tuple(str(name) for name in ignored)


def _check_redundant_fields(fields: _Fields, config: GlmDsaConfig) -> None:
    """Refuse fields that repeat a fact with another value: readers disagree on which one wins."""
    key_heads = fields.get("num_key_value_heads")
    if key_heads is not None and key_heads != config.num_attention_heads:
        raise _refuse(
            "num_key_value_heads",
            key_heads,
            f"num_attention_heads={config.num_attention_heads}",
            "MLA expands the latent to one key per query head",
        )
    qk_head_dim = fields.get("qk_head_dim")
    if qk_head_dim is not None and qk_head_dim != config.qk_head_dim:
        raise _refuse(
            "qk_head_dim",
            qk_head_dim,
            f"qk_nope_head_dim + qk_rope_head_dim = {config.qk_head_dim}",
            "correct or remove it",
        )
    mlp_types = fields.get("mlp_layer_types")
    if mlp_types is None:
        return
    expected = ["dense"] * config.num_dense_layers + ["sparse"] * config.num_moe_layers
    given = list(mlp_types) if isinstance(mlp_types, Sequence) else []
    for layer_id, kind in enumerate(expected):
        got = given[layer_id] if layer_id < len(given) else None
        if got != kind:
            raise _refuse(
                f"mlp_layer_types[{layer_id}]",
                got,
                f"{kind!r} by first_k_dense_replace={config.num_dense_layers}",
                "SGLang places the experts by first_k_dense_replace and would disagree",
            )
