"""Times transformers' Kimi Linear (PyTorch) on this machine; run by `k3 bench train`, needs neither jax nor k3jax.

Reads the shape as JSON from standard input, prints one JSON line. A step is forward, loss, backward and AdamW.
"""

import json
import statistics
import sys
import time

import torch
import transformers
from transformers import KimiLinearConfig, KimiLinearForCausalLM

shape = json.load(sys.stdin)
kimi_linear = {
    "attn_res": "none",
    "activation": "swiglu",
    "moe_latent_size": None,
    "moe_routed_norm": False,
    "kda_decay": "softplus",
    "kda_output_gate": "low_rank",
    "kda_num_value_heads": None,
    "kda_value_dim": shape["kda_key_dim"],
    "mla_output_gate": "none",
    "first_k_dense": 1,
}
other = [f"{field} = {shape[field]!r}" for field, value in kimi_linear.items() if shape[field] != value]
if other:
    sys.exit(f"the peer knows Kimi Linear only, not {', '.join(other)}")
mla_layers = set(shape["mla_layers"])
config = KimiLinearConfig(
    vocab_size=shape["vocab_size"],
    hidden_size=shape["hidden_size"],
    num_hidden_layers=shape["num_layers"],
    layer_types=["full_attention" if i + 1 in mla_layers else "linear_attention" for i in range(shape["num_layers"])],
    intermediate_size=shape["intermediate_size"],
    moe_intermediate_size=shape["moe_intermediate_size"],
    num_attention_heads=shape["mla_num_heads"],
    num_key_value_heads=shape["mla_num_heads"],
    num_local_experts=shape["num_experts"],
    num_experts_per_tok=shape["num_experts_per_token"],
    n_shared_experts=shape["num_shared_experts"],
    kv_lora_rank=shape["kv_lora_rank"],
    q_lora_rank=shape["q_lora_rank"],
    qk_nope_head_dim=shape["qk_nope_head_dim"],
    qk_rope_head_dim=shape["qk_rope_head_dim"],
    v_head_dim=shape["v_head_dim"],
    linear_num_heads=shape["kda_num_heads"],
    linear_head_dim=shape["kda_key_dim"],
    linear_conv_kernel_dim=shape["kda_conv_size"],
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
torch.manual_seed(0)
model = KimiLinearForCausalLM(config).float().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, shape["vocab_size"], (shape["batch_size"], shape["seq_len"]))


def step():
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


step()
times = []
for _ in range(shape["repeats"]):
    begin = time.perf_counter()
    step()
    times.append(time.perf_counter() - begin)
print(
    json.dumps(
        {
            "name": f"transformers {transformers.__version__} Kimi Linear, torch {torch.__version__}",
            "tokens_per_second": tokens.numel() / statistics.median(times),
            "parameters": sum(p.numel() for p in model.parameters()),
            "threads": torch.get_num_threads(),
        }
    )
)
