"""Print, as JSON, the parameter bytes of SGLang's own model class for rank 0 of several layouts.

Run as a process of its own, because publishing a server configuration is global. Parameters are
created on the meta device, so any layout can be built on a machine without a GPU.

Usage: `python sglang_model_bytes.py CONFIG_FOLDER '[[tp, attn_dp, ep], …]'`
"""

import collections
import json
import sys

import torch


def build_rank_zero(config_folder, tp_size, attn_dp_size, ep_size):
    from sglang.srt import runtime_context
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    class Group:
        rank = rank_in_group = local_rank = 0
        is_first_rank = is_last_rank = True
        cpu_group = device_group = None

        def __init__(self, world_size):
            self.world_size = world_size

    server_args = ServerArgs(
        model_path=config_folder,
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        tp_size=tp_size,
        attn_dp_size=attn_dp_size,
        ep_size=ep_size,
    )
    fields = runtime_context.SpawnRanks.__struct_fields__
    ranks = runtime_context.SpawnRanks(**dict.fromkeys(fields, 0))
    runtime_context.publish(server_args, role="scheduler", ranks=ranks)
    initialize_dp_attention_flags(server_args)
    parallel = runtime_context.get_parallel()
    names = [name for name in dir(parallel) if name.endswith("_group")]
    groups = {name: Group(group_size(parallel, name)) for name in names}
    config = AutoConfig.from_pretrained(config_folder)
    quantization = getattr(config, "quantization_config", None)
    quant_config = None if quantization is None else Fp8Config.from_config(quantization)
    with parallel.override(**groups), torch.device("meta"):
        return DeepseekV2ForCausalLM(config, quant_config=quant_config)


def group_size(parallel, name):
    return getattr(parallel, name.removesuffix("_group") + "_size", 1)


def main():
    import sglang.srt.layers.attention.dsa.dsa_indexer as dsa_indexer
    import sglang.srt.models.deepseek_v2 as deepseek_v2

    # Choices by GPU generation and RoPE tables need a device; neither has parameters.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "H200"
    for module in (deepseek_v2, dsa_indexer):
        module.get_rope_wrapper = lambda *_, **__: torch.nn.Identity()
    torch.set_default_dtype(torch.bfloat16)
    results = []
    for layout in json.loads(sys.argv[2]):
        totals = collections.Counter()
        for name, parameter in build_rank_zero(sys.argv[1], *layout).named_parameters():
            words = [word for word in name.split(".") if not word.isdigit()]
            totals[".".join(words)] += parameter.nbytes
        results.append(totals)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
