"""transformers' side of test_hf_transformers.py; needs torch and transformers, neither jax nor k3jax.

make FOLDER OUT: writes a tiny random model and, to OUT, tokens and its logits.
check FOLDER OUT: loads FOLDER, every tensor in its place, and adds its logits for OUT's tokens as "again".
"""

import sys

import numpy as np
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM


def logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(tokens)).logits.double().numpy()


def make(folder: str, out: str) -> None:
    config = KimiLinearConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_num_heads=4,
        linear_head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = KimiLinearForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # not all ones, so that one that is mistaken for another is seen
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    tokens = np.random.default_rng(0).integers(3, 257, (2, 48))
    np.savez(out, tokens=tokens, logits=logits(model, tokens))


def check(folder: str, out: str) -> None:
    model, info = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, wrong  # what strict means: nothing missing, unexpected or of another shape
    stored = dict(np.load(out))
    np.savez(out, **stored, again=logits(model, stored["tokens"]))


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
