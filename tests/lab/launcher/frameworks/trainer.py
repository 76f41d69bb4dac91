"""Training with the Hugging Face Trainer: a tiny random Llama, accumulation, evaluation."""

import hashlib
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    set_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=sys.argv[1], max_steps=3, per_device_train_batch_size=2, use_cpu=True,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, report_to=[],
        per_device_eval_batch_size=4, save_strategy="no", disable_tqdm=True, seed=3,
        logging_strategy="no",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(24), eval_dataset=Tokens(8))
    trainer.train()
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    if trainer.is_world_process_zero():
        print("final", hashlib.sha256(bits).hexdigest())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
